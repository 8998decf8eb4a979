#include "support.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <sstream>
#include <utility>

#include "engine/context.h"
#include "format/crc32.h"
#include "format/torch_record.h"
#include "staging/chunk_pool.h"

// Replaces libc's function, because a signal cannot be timed to interrupt a call that does not
// wait.
extern "C" int flock(int fd, int operation) noexcept {
  using torch_ckpt::test::flock_errors;
  ++torch_ckpt::test::flock_calls;
  if (flock_errors.empty()) return static_cast<int>(::syscall(SYS_flock, fd, operation));
  errno = flock_errors.back();
  flock_errors.pop_back();
  return -1;
}

// Replaces libc's function, because tests have no network file systems.
extern "C" int fstatfs(int fd, struct statfs* found) noexcept {
  constexpr long kFuse = 0x65735546;
  const int failed = static_cast<int>(::syscall(SYS_fstatfs, fd, found));
  if (failed == 0 && torch_ckpt::test::is_network_file_system) found->f_type = kFuse;
  return failed;
}

// Like MooseFS if another host creates the same file at the same time.
extern "C" int openat(int directory, const char* path, int flags, ...) {
  std::va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  const bool is_race = torch_ckpt::test::has_racing_host && (flags & (O_CREAT | O_EXCL)) == O_CREAT;
  const int access = is_race ? flags | O_EXCL : flags;
  return static_cast<int>(::syscall(SYS_openat, directory, path, access, mode));
}

// Replaces libc's function, because the file systems of tests refuse no aligned direct write.
extern "C" ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  std::barrier<>* const refusing = torch_ckpt::test::refusing_direct_writes;
  if (refusing != nullptr && (::fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
    refusing->arrive_and_wait();
    errno = EINVAL;
    return -1;
  }
  return ::syscall(SYS_pwrite64, fd, data, bytes, offset);
}

namespace torch_ckpt::test {

std::atomic<std::barrier<>*> refusing_direct_writes = nullptr;
thread_local bool has_racing_host = false;
thread_local std::vector<int> flock_errors;
thread_local int flock_calls = 0;
thread_local bool is_network_file_system = false;

}  // namespace torch_ckpt::test

namespace torch_ckpt {

engine::Context& context() { return engine::Context::process(); }

std::ostream& operator<<(std::ostream& out, Errc code) { return out << name(code); }

std::ostream& engine::operator<<(std::ostream& out, DirectIo mode) {
  switch (mode) {
    case DirectIo::automatic:
      return out << "Automatic";
    case DirectIo::on:
      return out << "Direct";
    case DirectIo::off:
      return out << "Buffered";
  }
  return out;
}

}  // namespace torch_ckpt

namespace torch_ckpt::test {
namespace {

namespace fs = std::filesystem;

// Longer than any test, so that a lost result fails the test instead of blocking it.
constexpr std::chrono::minutes kLongest{2};

// Ends the executor's threads before the sanitizers check for leaks.
class JoinAtEnd final : public ::testing::Environment {
 public:
  void TearDown() override {
    context().executor.join();
    context().chunks.trim(0);
  }
};

const auto* const kJoinAtEnd = ::testing::AddGlobalTestEnvironment(new JoinAtEnd);

}  // namespace

::testing::AssertionResult is_system_error(const Error& error, int sys_errno,
                                           std::string_view operation, std::string_view path) {
  if (error.code == Errc::system && error.sys_errno == sys_errno && error.operation == operation &&
      error.path == path) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << error.code << ", errno " << error.sys_errno << ", operation '" << error.operation
         << "', path '" << error.path << "': " << error.message();
}

TempDir::TempDir() {
  std::string pattern = fs::temp_directory_path().string() + "/torch_ckpt_test_XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) {
    ADD_FAILURE() << "mkdtemp " << pattern;
    std::abort();
  }
  path_ = std::move(pattern);
}

TempDir::~TempDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::vector<std::string> TempDir::names() const {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(path_)) {
    names.push_back(entry.path().lexically_relative(path_).string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

os::Directory open_directory(const TempDir& directory) {
  auto opened = os::Directory::open(directory.path());
  EXPECT_TRUE(ok(opened));
  return std::move(*opened);
}

Result<os::File> open_for_read(const std::string& path, os::IoMode mode) {
  const std::filesystem::path whole(path);
  auto directory = os::Directory::open(whole.parent_path().native());
  if (!directory) return directory.error();
  return directory->open_for_read(whole.filename().native(), mode);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.is_open()) << path;
  std::ostringstream contents;
  contents << file.rdbuf();
  return std::move(contents).str();
}

void write_file(const std::string& path, std::string_view contents) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::uint64_t Random::between(std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(engine_);
}

std::uint64_t Random::any_scale(std::uint64_t high) { return between(0, high) >> between(0, 63); }

std::string Random::bytes(std::size_t count) {
  std::string out(count, '\0');
  for (std::size_t at = 0; at < count; at += 8) {
    const std::uint64_t word = engine_();
    std::memcpy(out.data() + at, &word, std::min<std::size_t>(8, count - at));
  }
  return out;
}

struct NthCallFails::State {
  std::string operation;
  std::size_t n = 0;
  int sys_errno = 0;
  std::mutex mutex;
  std::size_t calls = 0;  // guarded by mutex
  std::string path;       // guarded by mutex
};

NthCallFails::NthCallFails(std::string operation, std::size_t n, int sys_errno)
    : state_(std::make_shared<State>()) {
  state_->operation = std::move(operation);
  state_->n = n;
  state_->sys_errno = sys_errno;
}

int NthCallFails::operator()(std::string_view operation, std::string_view path) const {
  std::lock_guard lock(state_->mutex);
  if (operation != state_->operation || ++state_->calls != state_->n) return 0;
  state_->path = path;
  return state_->sys_errno;
}

bool NthCallFails::hit() const {
  std::lock_guard lock(state_->mutex);
  return state_->calls >= state_->n;
}

std::string NthCallFails::path() const {
  std::lock_guard lock(state_->mutex);
  return state_->path;
}

struct CallCounter::State {
  std::mutex mutex;
  std::vector<std::string> log;  // guarded by mutex
};

CallCounter::CallCounter() : state_(std::make_shared<State>()) {}

int CallCounter::operator()(std::string_view operation, std::string_view path) const {
  std::lock_guard lock(state_->mutex);
  state_->log.push_back(std::string(operation) + " " + std::string(path));
  return 0;
}

std::size_t CallCounter::calls(std::string_view operation) const {
  const std::string begin = std::string(operation) + " ";
  std::size_t count = 0;
  for (const std::string& line : log()) count += line.starts_with(begin) ? 1 : 0;
  return count;
}

std::vector<std::string> CallCounter::log() const {
  std::lock_guard lock(state_->mutex);
  return state_->log;
}

staging::Source host_source(std::string_view payload) {
  staging::Source source;
  source.address = bytes_of(payload).data();
  source.bytes = payload.size();
  return source;
}

format::TensorHeader row_major(std::string_view dtype, std::vector<std::uint64_t> sizes) {
  format::TensorHeader header;
  header.dtype = format::find_dtype(dtype);
  header.storage_bytes = header.dtype->item_bytes;
  header.strides.resize(sizes.size());
  std::uint64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    header.strides[d] = stride;
    stride *= std::max<std::uint64_t>(sizes[d], 1);
    header.storage_bytes *= sizes[d];
  }
  header.sizes = std::move(sizes);
  return header;
}

std::string record_of(const format::TensorHeader& header, std::string_view payload) {
  const format::RecordTemplate record(format::encode_tensor_pickle(header), payload.size());
  return record.head() + std::string(payload) +
         record.encode_tail(format::crc32(0, bytes_of(payload)));
}

std::string byte_record(std::string_view payload) {
  return record_of(row_major("uint8", {payload.size()}), payload);
}

format::RecordSums sums_of(const engine::ImageItem& item, std::string_view bytes) {
  const bool is_tensor = item.record != nullptr;
  const std::size_t head_bytes = is_tensor ? item.record->layout().head_bytes : 0;
  const std::string_view head = bytes.substr(0, head_bytes);
  const std::string_view payload = bytes.substr(head_bytes, item.source.bytes);
  const std::string_view tail = bytes.substr(head_bytes + payload.size());
  format::RecordSums sums;
  sums.raw = item.record == nullptr;
  sums.offset = item.offset;
  sums.envelope_crc = format::crc32(0, bytes_of(std::string(head) + std::string(tail)));
  const std::uint64_t block = format::block_bytes_for(payload.size());
  if (payload.empty() || (is_tensor && payload.size() <= block)) return sums;
  sums.block_bytes = block;
  for (std::size_t at = 0; at < payload.size(); at += block) {
    sums.block_crcs.push_back(format::crc32(0, bytes_of(payload.substr(at, block))));
  }
  return sums;
}

std::string direct_io_name(const ::testing::TestParamInfo<engine::DirectIo>& mode) {
  std::ostringstream text;
  text << mode.param;
  return text.str();
}

Result<> run_save(const TempDir& directory, std::vector<engine::FileJob> files,
                  const engine::SaveOptions& options) {
  auto session =
      engine::SaveSession::start(context(), open_directory(directory), std::move(files), options);
  if (!session) return session.error();
  wait_for_end(**session);
  return (*session)->outcome();
}

void wait_for_end(engine::SaveSession& session) { ASSERT_TRUE(session.wait_for(kLongest)); }
void wait_for_end(engine::LoadSession& session) { ASSERT_TRUE(session.wait_for(kLongest)); }

}  // namespace torch_ckpt::test
