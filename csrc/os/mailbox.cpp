#include "os/mailbox.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "os/fault.h"
#include "os/shared_memory.h"
#include "os/uninterrupted.h"

namespace torch_ckpt::os {
namespace {

constexpr const char* kName = "torch_ckpt results";

struct Head {
  std::uint64_t end = sizeof(Head);  // offset after the last complete message
  std::uint64_t lost = 0;
};

// O_NONBLOCK and O_NOCTTY, because the descriptor number may refer to another file by now. O_RDWR
// opens both ends of a pipe, so that writing to a pipe without a reader raises no SIGPIPE.
constexpr int kOpenFlags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

// How often to check that senders are alive if the kernel cannot report their exit.
constexpr std::chrono::milliseconds kAliveInterval{1000};

Error last_error(const char* operation, const std::string& path) {
  return system_error(errno, operation, path);
}

}  // namespace

// The locked memory file. It has its own descriptor, because processes that share the mailbox's
// descriptor would also share a lock on it.
class Mailbox::Locked {
 public:
  static Result<Locked> open(const Mailbox& mailbox) {
    auto file =
        open_memory_file(mailbox.path(mailbox.address_.memory), mailbox.address_.memory_file);
    if (!file) return file.error();
    if (auto locked = file->lock(); !locked) return locked.error();
    Locked opened(std::move(*file));
    auto read = opened.file.read_at(std::as_writable_bytes(std::span(&opened.head, 1)), 0);
    if (!read) return read.error();
    return opened;
  }

  Locked(Locked&&) = default;
  // Closing the file does not release the lock if another thread forks meanwhile: the child
  // inherits the descriptor and with it the lock, and would wait for it.
  ~Locked() { file.unlock(); }

  Result<> write_head() { return file.write_at(std::as_bytes(std::span(&head, 1)), 0); }

  File file;
  Head head;

 private:
  explicit Locked(File opened) : file(std::move(opened)) {}
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
  auto locked = Locked::open(*this);
  if (!locked) return locked.error();
  if (auto put = locked->file.write_at(message, locked->head.end); !put) return put;
  // Wake the reader before completing the message: otherwise, if this process died in between, no
  // process would be woken for a complete message. The reader waits for the lock.
  if (wakes) {
    if (auto woken = wake(); !woken) return woken;
  }
  locked->head.end += message.size();
  return locked->write_head();
}

Result<> Mailbox::put_lost() {
  auto locked = Locked::open(*this);
  if (!locked) return locked.error();
  if (auto woken = wake(); !woken) return woken;
  locked->head.lost = 1;
  return locked->write_head();
}

Result<Mailbox::Contents> Mailbox::take() { return contents(true); }
Result<Mailbox::Contents> Mailbox::read() { return contents(false); }

Result<Mailbox::Contents> Mailbox::contents(bool takes) {
  auto locked = Locked::open(*this);
  if (!locked) return locked.error();
  auto& [file, head] = *locked;
  auto size = file.size();
  if (!size) return size.error();
  if (!inside(sizeof(Head), 0, head.end) || !inside(head.end, 0, *size)) {
    return format_error(Errc::frame_damaged,
                        "another process corrupted the shared memory used to send results");
  }
  Contents contents;
  contents.is_lost = head.lost != 0;
  contents.messages.resize(head.end - sizeof(Head));
  auto read = file.read_at(std::as_writable_bytes(std::span(contents.messages)), sizeof(Head));
  if (!read) return read.error();
  if (!takes) return contents;
  // This removes no byte of a later message, because the lock is held.
  std::array<char, 256> bytes{};
  while (::read(wake_read_, bytes.data(), bytes.size()) > 0) {
  }
  head = Head{};
  if (auto emptied = locked->write_head(); !emptied) return emptied.error();
  // Ignore errors: a failure to free memory must not lose the messages.
  static_cast<void>(file.truncate(sizeof(Head)));
  return contents;
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
