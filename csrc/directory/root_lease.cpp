#include "directory/root_lease.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <ctime>
#include <functional>
#include <map>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "directory/file_names.h"
#include "directory/root_lock.h"
#include "os/mutex.h"
#include "os/process.h"
#include "os/thread.h"

namespace torch_ckpt::directory {
namespace {

// A longer file was not written by torch_ckpt.
constexpr std::size_t kMaxBytes = 4096;

std::int64_t steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// --- records -------------------------------------------------------------------------------------

/// The fields of a lease: strings, and numbers as text.
using Record = std::map<std::string, std::string, std::less<>>;

/// Parses a JSON object without nested values. Returns an empty record for everything else.
class RecordParser {
 public:
  static Record parse(std::string_view text) {
    RecordParser parser(text);
    Record record;
    return parser.parse_object(record) ? record : Record();
  }

 private:
  explicit RecordParser(std::string_view text) : rest_(text) {}

  bool take(char wanted) {
    rest_.remove_prefix(std::min(rest_.find_first_not_of(" \t\r\n"), rest_.size()));
    if (rest_.empty() || rest_.front() != wanted) return false;
    rest_.remove_prefix(1);
    return true;
  }

  bool parse_object(Record& record) {
    if (!take('{')) return false;
    if (take('}')) return true;
    do {
      std::string name;
      std::string value;
      if (!parse_string(name) || !take(':')) return false;
      if (!parse_string(value)) {
        const std::size_t end = rest_.find_first_of(",}[]{\" \t\r\n");
        if (end == 0 || end == std::string_view::npos) return false;
        value = rest_.substr(0, end);
        rest_.remove_prefix(end);
      }
      record.insert_or_assign(std::move(name), std::move(value));
    } while (take(','));
    return take('}');
  }

  bool parse_string(std::string& text) {
    if (!take('"')) return false;
    while (!rest_.empty()) {
      const char c = rest_.front();
      rest_.remove_prefix(1);
      if (c == '"') return true;
      if (c != '\\') {
        text += c;
      } else if (!parse_escape(text)) {
        return false;
      }
    }
    return false;
  }

  bool parse_escape(std::string& text) {
    if (rest_.empty()) return false;
    const char c = rest_.front();
    rest_.remove_prefix(1);
    if (c != 'u') {
      text += c;
      return true;
    }
    unsigned code = 0;
    const std::string_view digits = rest_.substr(0, 4);
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (digits.size() != 4 || parsed.ptr != digits.data() + 4) return false;
    // Names of hosts are ASCII.
    text += code < 0x80 ? static_cast<char>(code) : '?';
    rest_.remove_prefix(4);
    return true;
  }

  std::string_view rest_;
};

std::string json_text(std::string_view text) {
  std::string json = "\"";
  for (const char c : text) {
    const bool is_plain = c >= ' ' && c < 0x7f && c != '"' && c != '\\';
    json += is_plain ? c : '?';
  }
  return json + '"';
}

/// Returns the content of this process's lease.
std::string own_record() {
  const os::ProcessSpace space = os::own_process_space();
  const os::ProcessId process = os::own_process();
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  std::string text = "{\"host\": " + json_text(space.host);
  if (!space.boot.empty()) {
    text += ", \"boot\": " + json_text(space.boot) + ", \"pids\": " + json_text(space.pids);
  }
  text += ", \"pid\": " + std::to_string(process.number);
  if (process.start != 0) text += ", \"start\": " + json_text(std::to_string(process.start));
  const std::string fraction = std::to_string(1000 + ms % 1000).substr(1);
  return text + ", \"began_at\": " + std::to_string(ms / 1000) + "." + fraction + "}";
}

std::string field(const Record& record, std::string_view name) {
  const auto found = record.find(name);
  return found == record.end() ? std::string() : found->second;
}

template <class Number>
std::optional<Number> number_in(const Record& record, std::string_view name) {
  const std::string text = field(record, name);
  Number number{};
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
  return is_number ? std::optional(number) : std::nullopt;
}

std::string describe(const Record& record) {
  const auto or_unknown = [&](std::string_view name) {
    const std::string value = field(record, name);
    return value.empty() ? std::string("?") : value;
  };
  std::string text = "process " + or_unknown("pid") + " on host " + or_unknown("host");
  constexpr double kLatest = 1e11;
  const auto began = number_in<double>(record, "began_at");
  if (began && std::abs(*began) < kLatest) {
    const auto seconds = static_cast<std::time_t>(*began);
    char buffer[64];
    if (::ctime_r(&seconds, buffer) != nullptr) {
      const std::string_view date = buffer;
      text += ", since " + std::string(date.substr(0, date.find('\n')));
    }
  }
  return text;
}

Result<> write_record(os::File& file) {
  // Ignore a file system without locks: the record in the file then has to suffice.
  static_cast<void>(file.try_lock());
  const std::string record = own_record();
  if (auto written = file.write_at(std::as_bytes(std::span(record)), 0); !written) return written;
  // No process may ever find an incomplete lease, even after the machine has crashed.
  return file.sync();
}

Error in_use(std::string detail) { return format_error(Errc::root_in_use, std::move(detail)); }

// --- the leases of this process ------------------------------------------------------------------

struct Leases {
  os::Mutex mutex;
  std::vector<std::shared_ptr<RootLease>> held TC_GUARDED_BY(mutex);
  // In a forked child. Never destroyed, because their threads do not exist in the child.
  std::vector<std::shared_ptr<RootLease>> of_parent TC_GUARDED_BY(mutex);
};

}  // namespace

/// The leases of this process. Never destroyed, because threads may use them until the process
/// ends.
struct OwnLeases {
  static Leases& get() {
    static Leases* const all = [] {
      // Hold the mutex across fork, so that no other thread holds it in the child.
      ::pthread_atfork(lock, unlock, begin_child);
      return new Leases;
    }();
    return *all;
  }

 private:
  static void lock() TC_NOT_ANALYZED { get().mutex.lock(); }
  static void unlock() TC_NOT_ANALYZED { get().mutex.unlock(); }
  static void begin_child() TC_NOT_ANALYZED {
    for (auto& lease : std::exchange(get().held, {})) {
      // Close the child's descriptor, so that the lock ends with the parent.
      const os::File closed = std::move(lease->file_);
      get().of_parent.push_back(std::move(lease));
    }
    unlock();
  }
};

/// A lease found in a root. This process or another one holds it.
struct ExistingLease {
  os::File file;
  os::FileIdentity identity;
  std::int64_t touched_ns = 0;
  Record record;

  /// Returns nullopt if there is none.
  static Result<std::optional<ExistingLease>> open(const os::Directory& root) {
    // On NFS, opening the file revalidates its cached attributes.
    auto file = root.open_for_read(std::string(kLeaseName));
    if (!file && file.error().sys_errno == ENOENT) return std::optional<ExistingLease>();
    if (!file) return file.error();
    auto identity = file->identity();
    if (!identity) return identity.error();
    auto touched = file->modified_ns();
    if (!touched) return touched.error();
    std::string text(kMaxBytes, 0);
    auto bytes = file->read_some_at(std::as_writable_bytes(std::span(text)), 0);
    if (!bytes) return bytes.error();
    text.resize(*bytes);
    return std::optional(
        ExistingLease{std::move(*file), *identity, *touched, RecordParser::parse(text)});
  }

  /// Returns true if the process that holds the lease is alive; nullopt if that is still unknown.
  std::optional<bool> is_alive() {
    const os::ProcessSpace own = os::own_process_space();
    const bool is_on_this_boot = !own.boot.empty() && field(record, "boot") == own.boot;
    if (is_on_this_boot && field(record, "host") == own.host && field(record, "pids") == own.pids) {
      const auto pid = number_in<std::int64_t>(record, "pid");
      const auto start = number_in<std::uint64_t>(record, "start");
      // If the PID is this process's, the process has replaced its program by exec after it took
      // the lease.
      if (!pid || !start || *pid == os::own_process().number) return false;
      return os::is_alive({*pid, *start});
    }
    const auto locked = file.try_lock();
    if (locked && !*locked) return true;
    // A run writes the record before it renames the file, so no run has written an empty one.
    if (record.empty()) return false;
    // The lock was free; closing the descriptor releases it again. A kernel knows all locks of its
    // own processes, but may not see locks held on other hosts.
    return locked && is_on_this_boot ? std::optional(false) : std::nullopt;
  }
};

// --- a held lease --------------------------------------------------------------------------------

/// The thread that touches the file.
struct RootLease::Renewal {
  os::Mutex mutex;
  os::CondVar changed;
  bool ends TC_GUARDED_BY(mutex) = false;
  std::thread thread;

  void run(os::File& file, double every_s) {
    const std::chrono::nanoseconds every(static_cast<std::int64_t>(every_s * 1e9));
    const os::MutexLock lock(mutex);
    auto next = std::chrono::steady_clock::now() + every;
    while (!ends) {
      if (changed.wait_until(mutex, next)) continue;
      // Ignore a failure: the next attempt may succeed, and otherwise saves fail, too.
      static_cast<void>(file.touch());
      next = std::chrono::steady_clock::now() + every;
    }
  }
  void end() {
    {
      const os::MutexLock lock(mutex);
      ends = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }
};

RootLease::RootLease(std::string root, os::File file, os::FileIdentity identity, bool has_made_root)
    : root_(std::move(root)),
      file_(std::move(file)),
      identity_(identity),
      has_made_root_(has_made_root),
      renewal_(std::make_unique<Renewal>()) {}

RootLease::~RootLease() = default;

Result<> RootLease::require() const {
  if (process_.inherited()) {
    return in_use(root_ + ": this process is a forked child of process " +
                  std::to_string(process_.creator()) +
                  ", which holds the lease. Save in the parent, or use another root.");
  }
  auto root = os::Directory::open(root_);
  if (!root) return {};
  const auto found = ExistingLease::open(*root);
  // If the file is missing, a user has removed it. If it cannot be read, the file system is
  // failing, and so will the save.
  if (!found || !*found || (*found)->identity == identity_) return {};
  return in_use(root_ + ": " + describe((*found)->record) +
                " has taken over this root. This run can no longer save to it.");
}

void RootLease::release() {
  if (process_.inherited()) return;
  Leases& own = OwnLeases::get();
  {
    const os::MutexLock lock(own.mutex);
    if (users_ == 0 || --users_ > 0) return;
  }
  end();
}

void RootLease::end() {
  // Keeps this object alive until the end of the function.
  std::shared_ptr<RootLease> self;
  Leases& own = OwnLeases::get();
  {
    const os::MutexLock lock(own.mutex);
    users_ = 0;
    for (auto& lease : own.held) {
      if (lease.get() == this) self = std::move(lease);
    }
    std::erase(own.held, nullptr);
  }
  if (self == nullptr) return;
  renewal_->end();
  if (auto root = os::Directory::open(root_)) {
    if (const auto lock = RootLock::take(*root)) {
      // Another run may have taken over the root.
      static_cast<void>(root->remove(std::string(kLeaseName), identity_));
    }
  }
  // If a step was saved, rmdir() fails, as it should.
  if (has_made_root_) static_cast<void>(os::remove_directory(root_));
  // Unlock explicitly: a child forked by native code still has the descriptor open.
  file_.unlock();
  static_cast<void>(std::move(file_).close());
}

// --- requests ------------------------------------------------------------------------------------

LeaseRequest::LeaseRequest(std::string root, bool takeover, LeaseTimes times)
    : root_(std::move(root)), takeover_(takeover), times_(times), started_ns_(steady_ns()) {}

Result<std::shared_ptr<RootLease>> LeaseRequest::try_take() {
  while (true) {
    auto root = os::Directory::open(root_);
    if (!root && root.error().sys_errno == ENOENT) {
      has_made_root_ = true;
      if (auto made = os::make_directories(root_); !made) return made.error();
      root = os::Directory::open(root_);
    }
    auto taken = root ? try_take_in(*root) : root.error();
    // ENOENT: another manager has removed its lease or the root. On a file system without locks, it
    // may also have removed the temporary file.
    if (taken || taken.error().sys_errno != ENOENT) return taken;
  }
}

Result<std::shared_ptr<RootLease>> LeaseRequest::try_take_in(const os::Directory& root) {
  Leases& own = OwnLeases::get();
  const os::MutexLock own_lock(own.mutex);
  const auto lock = RootLock::take(root);
  if (!lock) return lock.error();
  auto found = ExistingLease::open(root);
  if (!found) return found.error();
  for (const auto& lease : own.held) {
    if (!*found || lease->identity_ != (*found)->identity) continue;
    ++lease->users_;
    return lease;
  }
  auto names = root.names();
  if (!names) return names.error();
  // Remove the temporary files of processes that were killed while taking the lease. With the lock
  // on the root, no other process is taking the lease now.
  const std::string prefix = std::string(kLeaseName) + ".";
  for (const std::string& name : *names) {
    if (name.starts_with(prefix) && name.size() == prefix.size() + kTagDigits) {
      static_cast<void>(root.remove(name));
    }
  }
  std::string name = prefix + random_hex(kTagDigits);
  auto file = root.create(name, os::IoMode::buffered);
  if (!file) return file.error();
  auto taken = [&]() -> Result<std::shared_ptr<RootLease>> {
    if (auto written = write_record(*file); !written) return written.error();
    auto may_take = !*found ? Result<bool>(true) : may_replace(**found, *file);
    if (!may_take) return may_take.error();
    if (!*may_take) return std::shared_ptr<RootLease>();
    auto identity = file->identity();
    if (!identity) return identity.error();
    if (auto renamed = root.rename(name, std::string(kLeaseName)); !renamed) return renamed.error();
    name = kLeaseName;
    std::shared_ptr<RootLease> lease(
        new RootLease(root_, std::move(*file), *identity, has_made_root_));
    auto started = os::start_thread(lease->renewal_->thread,
                                    [&renewal = *lease->renewal_, &renewed = lease->file_,
                                     every = times_.renew_s] { renewal.run(renewed, every); });
    if (!started) return started.error();
    return lease;
  }();
  if (taken && *taken != nullptr) {
    own.held.push_back(*taken);
  } else {
    static_cast<void>(root.remove(name));
  }
  return taken;
}

Result<bool> LeaseRequest::may_replace(ExistingLease& found, const os::File& file) {
  if (takeover_) return true;
  std::optional<bool> is_alive = found.is_alive();
  if (!is_alive && first_ && first_->identity == found.identity &&
      first_->touched_ns != found.touched_ns) {
    is_alive = true;
  }
  if (!is_alive) {
    // Both times are from the file system's clock.
    auto now = file.modified_ns();
    if (!now) return now.error();
    const auto expiry_ns = static_cast<std::int64_t>(times_.expiry_s * 1e9);
    const bool is_expired = steady_ns() - started_ns_ > expiry_ns;
    if (is_expired || *now - found.touched_ns > expiry_ns) is_alive = false;
  }
  holder_ = describe(found.record);
  if (is_alive == true) {
    return in_use(root_ + ": another run is writing to this root: " + holder_ +
                  ". Wait until it has ended, or use another root. To take over the root and make "
                  "the other run's saves fail, pass takeover=True to CheckpointManager.");
  }
  if (!is_alive && !first_) first_ = Seen{found.identity, found.touched_ns};
  return is_alive.has_value();
}

void release_leases() {
  std::vector<std::shared_ptr<RootLease>> held;
  {
    Leases& own = OwnLeases::get();
    const os::MutexLock lock(own.mutex);
    held = own.held;
  }
  for (const auto& lease : held) lease->end();
}

}  // namespace torch_ckpt::directory
