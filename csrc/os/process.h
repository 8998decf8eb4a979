#pragma once

#include <cstdint>

namespace torch_ckpt::os {

/// A process of this machine, told apart from later ones that get its number.
struct ProcessId {
  std::int64_t number = 0;
  std::uint64_t start = 0;  // in ticks since the system's start; 0: not known

  bool operator==(const ProcessId&) const = default;
};

ProcessId own_process();

/// Whether it has not ended; a process that nobody has waited for yet has ended.
bool is_alive(const ProcessId& process);

// Becomes readable for poll() when a process ends. Owns the descriptor.
// Not to be had on kernels before 5.3 and in some sandboxes: fd() is then -1.
class ProcessEnd {
 public:
  explicit ProcessEnd(const ProcessId& process);
  ProcessEnd(ProcessEnd&& other) noexcept;
  ProcessEnd(const ProcessEnd&) = delete;
  ProcessEnd& operator=(const ProcessEnd&) = delete;
  ~ProcessEnd();

  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace torch_ckpt::os
