#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "error.h"
#include "os/file.h"
#include "os/process.h"

namespace torch_ckpt::os {

// Messages between processes of one user, in memory.
//
//   1. A mailbox is a memory file and a pipe. The file begins with the number of complete bytes,
//      followed by the messages, one after another.
//   2. A sender locks the file, appends the message, writes a byte into the pipe, and then writes
//      the new number. If it dies before that, the next sender overwrites the incomplete message.
//      The kernel releases the lock of a dead process.
//   3. The byte in the pipe wakes waiting processes. It stays there until the messages are taken:
//      the pipe is readable as long as there is a message.
//   4. Forked children inherit the descriptors. Other processes open them through /proc, which the
//      kernel permits only to the same user, and compare the opened files with the address.
//
// A put never waits for a reader, and a message outlives its sender. The mailbox lives as long as
// its owner or a forked child of the owner.
// Owns the descriptors, or has only an address. Safe for concurrent use by multiple threads.
class Mailbox {
 public:
  /// The descriptors of the owning process, for other processes.
  struct Address {
    std::int64_t process = 0;
    int memory = -1;
    int wake = -1;
    // The expected files, since a descriptor number may belong to another file by now.
    FileIdentity memory_file;
    std::uint64_t wake_pipe = 0;  // inode number
  };

  static Result<Mailbox> create();
  /// Refers to the mailbox of another process. Only put() may be called; each call opens it.
  explicit Mailbox(const Address& address) : address_(address) {}

  Mailbox(Mailbox&& other) noexcept;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  const Address& address() const { return address_; }

  /// Appends a message. If `wakes` is false, it does not wake a process that waits.
  Result<> put(std::span<const std::byte> message, bool wakes = true);
  /// Marks that a message was lost, because there is no memory for it.
  Result<> put_lost();

  struct Contents {
    std::string messages;  // one after another
    bool is_lost = false;  // a message was lost
  };
  /// Returns all messages and removes them.
  Result<Contents> take();
  /// Returns all messages and leaves them in the mailbox.
  Result<Contents> read();

  /// Wakes waiting processes, without a message.
  Result<> wake();
  /// Waits for a message, a call of wake(), the end of one of `senders` or a signal, for up to
  /// `timeout`. May return earlier.
  Result<> wait(std::chrono::milliseconds timeout, std::span<const ProcessId> senders);

 private:
  class Locked;
  Mailbox() = default;
  Result<Contents> contents(bool takes);
  std::string path(int fd) const;

  int memory_ = -1;
  int wake_read_ = -1;
  int wake_write_ = -1;
  Address address_;
};

}  // namespace torch_ckpt::os
