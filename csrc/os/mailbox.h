#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "error.h"
#include "os/file.h"
#include "os/process.h"

namespace torch_ckpt::os {

// In-memory messages between processes of the same user.
//
//   1. A mailbox is a memory file and a pipe. The file begins with a head, which stores where the
//      complete messages end, and where those that were taken end. The messages follow, one after
//      another.
//   2. A sender locks the file, appends the message, updates the head, unlocks the file, and then
//      writes a byte to the pipe. If the sender dies before it updates the head, the next sender
//      overwrites the incomplete message. The kernel releases the lock of a dead process.
//   3. Readers take no lock, so a suspended reader delays no sender. A suspended sender may hold the
//      lock: other senders then fail after a second. Marking a message as lost needs no lock.
//   4. The byte in the pipe wakes waiting processes. It stays in the pipe until messages are taken.
//      If a sender dies before it writes the byte, its end wakes the processes that wait for it.
//   5. Forked children inherit the descriptors. Other processes open them through /proc, which the
//      kernel permits only to the same user, and compare the opened files with the address.
//
// Sending never waits for a reader, and a message outlives its sender. The mailbox lives as long as
// its owner or any forked child of the owner. An object owns the descriptors or has only an
// address. Safe for concurrent use by multiple threads.
class Mailbox {
 public:
  /// The descriptors of the owning process, by which other processes open the mailbox.
  struct Address {
    std::int64_t process = 0;
    int memory = -1;
    int wake = -1;
    // Identities of the files: by the time of use, a descriptor number may refer to another file.
    FileIdentity memory_file;
    std::uint64_t wake_pipe = 0;  // inode number
  };

  static Result<Mailbox> create();
  /// Refers to the mailbox of another process. Only put() may be called; it opens the mailbox anew
  /// each time.
  explicit Mailbox(const Address& address) : address_(address) {}

  Mailbox(Mailbox&& other) noexcept;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  const Address& address() const { return address_; }

  /// Appends a message. Wakes waiting processes unless `wakes` is false.
  Result<> put(std::span<const std::byte> message, bool wakes = true);
  /// Records that a message was lost because there was no memory for it.
  Result<> put_lost();

  struct Contents {
    std::string messages;  // one after another
    bool is_lost = false;  // a message was lost; see put_lost()
  };
  /// Returns all messages and removes them. Only one process may take messages, in one thread at a
  /// time.
  Result<Contents> take();
  /// Returns all messages without removing them.
  Result<Contents> read();

  /// Wakes waiting processes without sending a message.
  Result<> wake();
  /// Waits up to `timeout` until a message arrives, wake() is called, one of `senders` ends, or a
  /// signal arrives. May return early.
  Result<> wait(std::chrono::milliseconds timeout, std::span<const ProcessId> senders);

 private:
  class Memory;
  Mailbox() = default;
  Result<Contents> contents(bool takes);
  std::string path(int fd) const;

  int memory_ = -1;
  int wake_read_ = -1;
  int wake_write_ = -1;
  Address address_;
};

}  // namespace torch_ckpt::os
