#pragma once

#include <cstdint>

namespace torch_ckpt::os {

/// Identity of a process of this machine, unlike the process id also over time.
struct ProcessId {
  std::int64_t number = 0;
  std::uint64_t start = 0;  // in ticks since the system's start; 0: unknown

  bool operator==(const ProcessId&) const = default;
};

ProcessId own_process();

/// Returns false if the process has ended; a zombie has ended.
bool is_alive(const ProcessId& process);

// A descriptor that becomes readable for poll() when a process ends. Owns the descriptor.
// fd() is -1 on kernels before 5.3, in some sandboxes, and if the process has already ended.
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
