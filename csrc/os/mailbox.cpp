#include "os/mailbox.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "os/fault.h"
#include "os/shared_memory.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

constexpr const char* kName = "torch_ckpt results";

// The beginning of the memory file.
struct Head {
  // Offset after the last complete message. Readers hold no lock, so they may see a partial write:
  // the two fields are then not complements of each other.
  struct End {
    std::uint64_t offset = sizeof(Head);
    std::uint64_t complement = ~offset;
  };
  End end;
  std::uint64_t taken = sizeof(Head);  // offset after the last message that was taken
  std::uint64_t lost = 0;
};

// How long a sender waits for other senders. A sender holds the lock for microseconds, unless the
// process is suspended.
constexpr std::chrono::milliseconds kSendPatience{1000};
constexpr std::chrono::milliseconds kLockInterval{1};

// How often a reader reads a head that another process is writing.
constexpr int kMaxHeadReads = 1000;

constexpr std::uint64_t kPageBytes = 4096;

// O_NONBLOCK and O_NOCTTY, because the descriptor number may refer to another file by now. O_RDWR
// opens both ends of a pipe, so that writing to a pipe without a reader raises no SIGPIPE.
constexpr int kOpenFlags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

// How often to check that senders are alive if the kernel cannot report their exit.
constexpr std::chrono::milliseconds kAliveInterval{1000};

Error last_error(const char* operation, const std::string& path) {
  return system_error(errno, operation, path);
}

}  // namespace

// The memory file, with a descriptor of its own: processes that share the mailbox's descriptor
// would also share a lock on it.
class Mailbox::Memory {
 public:
  static Result<Memory> open(const Mailbox& mailbox) {
    auto file =
        open_memory_file(mailbox.path(mailbox.address_.memory), mailbox.address_.memory_file);
    if (!file) return file.error();
    return Memory(std::move(*file));
  }

  Memory(Memory&&) = default;
  // Closing the file does not release the lock if another thread forks meanwhile: the child
  // inherits the descriptor and with it the lock.
  ~Memory() {
    if (is_locked_) file_.unlock();
  }

  Result<> lock() {
    const auto deadline = std::chrono::steady_clock::now() + kSendPatience;
    for (;;) {
      auto locked = file_.try_lock();
      if (!locked) return locked.error();
      if (*locked) break;
      if (std::chrono::steady_clock::now() >= deadline) {
        return system_error(ETIMEDOUT, "flock", file_.path());
      }
      std::this_thread::sleep_for(kLockInterval);
    }
    is_locked_ = true;
    return {};
  }

  /// Needs no lock.
  Result<Head> head() const {
    for (int reads = 0; reads < kMaxHeadReads; ++reads) {
      Head head;
      TC_TRY(file_.read_at(std::as_writable_bytes(std::span(&head, 1)), 0));
      if (head.end.offset == ~head.end.complement) {
        // Read the messages after the head that announces them.
        std::atomic_thread_fence(std::memory_order_acquire);
        return checked(head);
      }
      std::this_thread::yield();
    }
    return damaged();
  }

  Result<> append(const Head& head, std::span<const std::byte> message) {
    TC_TRY(file_.write_at(message, head.end.offset));
    std::atomic_thread_fence(std::memory_order_release);
    const std::uint64_t end = head.end.offset + message.size();
    return write(Head::End{end, ~end}, offsetof(Head, end));
  }
  /// Needs no lock, because no other field is written.
  Result<> mark_lost() { return write(std::uint64_t{1}, offsetof(Head, lost)); }
  /// Needs no lock, because only one process takes messages.
  Result<> mark_taken(std::uint64_t end) { return write(end, offsetof(Head, taken)); }

  Result<std::string> messages(std::uint64_t begin, std::uint64_t end) const {
    std::string bytes(end - begin, '\0');
    TC_TRY(file_.read_at(std::as_writable_bytes(std::span(bytes)), begin));
    return bytes;
  }
  /// Frees the memory of messages that were taken.
  void free_taken(std::uint64_t end) {
    const std::uint64_t last = align_down(end, kPageBytes);
    // Ignore errors: a failure to free memory must not lose the messages.
    if (last > kPageBytes) static_cast<void>(file_.punch_hole(kPageBytes, last - kPageBytes));
  }

 private:
  explicit Memory(File file) : file_(std::move(file)) {}

  static Error damaged() {
    return format_error(Errc::frame_damaged,
                        "another process corrupted the shared memory used to send results");
  }
  Result<Head> checked(const Head& head) const {
    auto size = file_.size();
    if (!size) return size.error();
    if (head.taken < sizeof(Head) || head.taken > head.end.offset || head.end.offset > *size) {
      return damaged();
    }
    return head;
  }
  template <class T>
  Result<> write(const T& value, std::uint64_t offset) {
    return file_.write_at(std::as_bytes(std::span(&value, 1)), offset);
  }

  File file_;
  bool is_locked_ = false;
};

Result<Mailbox> Mailbox::create() {
  TC_FAULT("memfd_create", kName);
  const int memory = ::memfd_create(kName, MFD_CLOEXEC);
  if (memory < 0) return last_error("memfd_create", kName);
  Mailbox mailbox;
  mailbox.memory_ = mailbox.address_.memory = memory;
  mailbox.address_.process = ::getpid();
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return last_error("pipe2", kName);
  mailbox.wake_read_ = ends[0];
  mailbox.wake_write_ = mailbox.address_.wake = ends[1];
  struct stat pipe {};
  if (::fstat(ends[1], &pipe) != 0) return last_error("fstat", kName);
  mailbox.address_.wake_pipe = pipe.st_ino;
  const Head head;
  if (::pwrite(memory, &head, sizeof(head), 0) != sizeof(head)) return last_error("pwrite", kName);
  TC_FAULT("statx", kName);
  auto identity = identity_at(memory, "", AT_EMPTY_PATH, kName);
  if (!identity) return identity.error();
  mailbox.address_.memory_file = *identity;
  return mailbox;
}

Mailbox::Mailbox(Mailbox&& other) noexcept
    : memory_(std::exchange(other.memory_, -1)),
      wake_read_(std::exchange(other.wake_read_, -1)),
      wake_write_(std::exchange(other.wake_write_, -1)),
      address_(other.address_) {}

Mailbox::~Mailbox() {
  for (const int fd : {memory_, wake_read_, wake_write_}) {
    if (fd >= 0) ::close(fd);
  }
}

// A forked child uses its own copies of the descriptors, because the owner may have ended.
std::string Mailbox::path(int fd) const {
  const std::string process = memory_ >= 0 ? "self" : std::to_string(address_.process);
  return "/proc/" + process + "/fd/" + std::to_string(fd);
}

Result<> Mailbox::put(std::span<const std::byte> message, bool wakes) {
  {
    auto memory = Memory::open(*this);
    if (!memory) return memory.error();
    TC_TRY(memory->lock());
    auto head = memory->head();
    if (!head) return head.error();
    TC_TRY(memory->append(*head, message));
  }
  return wakes ? wake() : Result<>();
}

Result<> Mailbox::put_lost() {
  auto memory = Memory::open(*this);
  if (!memory) return memory.error();
  TC_TRY(memory->mark_lost());
  return wake();
}

Result<Mailbox::Contents> Mailbox::take() {
  // Empty the pipe first: messages that arrive later fill it again.
  std::array<char, 256> bytes{};
  while (::read(wake_read_, bytes.data(), bytes.size()) > 0) {
  }
  return contents(true);
}
Result<Mailbox::Contents> Mailbox::read() { return contents(false); }

Result<Mailbox::Contents> Mailbox::contents(bool takes) {
  auto memory = Memory::open(*this);
  if (!memory) return memory.error();
  auto head = memory->head();
  if (!head) return head.error();
  auto messages = memory->messages(head->taken, head->end.offset);
  if (!messages) return messages.error();
  if (takes && !messages->empty()) {
    TC_TRY(memory->mark_taken(head->end.offset));
    memory->free_taken(head->end.offset);
  }
  return Contents{std::move(*messages), head->lost != 0};
}

Result<> Mailbox::wake() {
  int fd = wake_write_;
  const std::string other = path(address_.wake);
  if (fd < 0) {
    fd = uninterrupted([&] { return ::open(other.c_str(), kOpenFlags); });
    if (fd < 0) return last_error("open", other);
  }
  const char byte = 0;
  struct stat status {};
  int sys_errno = 0;
  if (::fstat(fd, &status) != 0) {
    sys_errno = errno;
  } else if (!S_ISFIFO(status.st_mode) || status.st_ino != address_.wake_pipe) {
    sys_errno = ENOENT;  // the descriptor number refers to another file by now
  } else if (uninterrupted([&] { return static_cast<int>(::write(fd, &byte, 1)); }) < 0) {
    sys_errno = errno;
  }
  if (wake_write_ < 0) ::close(fd);
  // EAGAIN: the pipe is full, so it already wakes the reader.
  if (sys_errno != 0 && sys_errno != EAGAIN) return system_error(sys_errno, "write", other);
  return {};
}

Result<> Mailbox::wait(std::chrono::milliseconds timeout, std::span<const ProcessId> senders) {
  std::vector<ProcessEnd> ends;
  std::vector<pollfd> fds{{wake_read_, POLLIN, 0}};
  for (const ProcessId& sender : senders) {
    if (!is_alive(sender)) return {};
    ends.emplace_back(sender);
    if (ends.back().fd() >= 0) {
      fds.push_back({ends.back().fd(), POLLIN, 0});
    } else {
      timeout = std::min(timeout, kAliveInterval);
    }
  }
  constexpr std::chrono::milliseconds kLongest{std::chrono::hours{24}};
  const int bounded = static_cast<int>(std::clamp(timeout, {}, kLongest).count());
  if (::poll(fds.data(), fds.size(), bounded) < 0 && errno != EINTR) {
    return last_error("poll", kName);
  }
  return {};
}

}  // namespace torch_ckpt::os
