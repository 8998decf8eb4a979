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
//   1. A mailbox is a file in memory and a pipe. The file begins with the number of bytes that are
//      complete; messages lie behind each other after that.
//   2. Whoever puts a message locks the file, writes the message behind what is complete, a byte
//      into the pipe, and then the new number. One that dies before leaves nothing but bytes that
//      the next one overwrites. The lock ends with its owner.
//   3. The byte in the pipe wakes who waits. It stays until the messages have been taken: as long
//      as there is a message the pipe can be read.
//   4. Forked children inherit the descriptors. Others open them through /proc, where the kernel
//      lets only the same user do so, and compare what they have opened with the address.
//
// Nobody has to read for a put to end, and what was put outlives its sender. Nothing outlives the
// owner and his forked children.
// Owns the descriptors, or has an address alone. Safe for concurrent use by multiple threads.
class Mailbox {
 public:
  /// Where other processes find it.
  struct Address {
    std::int64_t process = 0;
    int memory = -1;
    int wake = -1;
    // What is found there must be these: a number of a descriptor may be another file's by now.
    FileIdentity memory_file;
    std::uint64_t wake_pipe = 0;  // its inode's number
  };

  static Result<Mailbox> create();
  /// That of another process, which the methods look for each time. For put() alone.
  explicit Mailbox(const Address& address) : address_(address) {}

  Mailbox(Mailbox&& other) noexcept;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox();

  const Address& address() const { return address_; }

  /// With `wakes` false only a later message wakes who waits.
  Result<> put(std::span<const std::byte> message, bool wakes = true);
  /// Tells that a message was lost, where there is no memory for it.
  Result<> put_lost();

  struct Contents {
    std::string messages;  // one behind the other
    bool is_lost = false;  // a message was lost
  };
  /// All that was put and has not been taken.
  Result<Contents> take();
  /// The same, and leaves it there.
  Result<Contents> read();

  /// Wakes who waits, without a message.
  Result<> wake();
  /// Waits until there is a message, somebody wakes, one of `senders` has ended, `timeout` has
  /// passed or a signal has come. May return earlier.
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
