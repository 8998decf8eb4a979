#pragma once

namespace torch_ckpt::os {

/// Scheduling priority of a thread.
struct Priority {
  int nice = 0;          // 0 to 19; 19 is the lowest priority
  bool idle_io = false;  // the idle class: its disk I/O waits for all other processes

  bool operator==(const Priority&) const = default;
};

/// Lowers the calling thread to this priority; never raises it, which would need privileges.
/// Ignores refusals of the system: a save that competes with other processes is better than none.
void lower_priority(const Priority& priority);

}  // namespace torch_ckpt::os
