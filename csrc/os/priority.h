#pragma once

namespace torch_ckpt::os {

/// Scheduling priority of a thread.
struct Priority {
  int nice = 0;          // 0 to 19; 19 is the lowest priority
  bool idle_io = false;  // idle I/O class: disk I/O waits until no other process uses the disk

  bool operator==(const Priority&) const = default;
};

/// Lowers the priority of the calling thread. Never raises it, which would need privileges. Ignores
/// errors: a save that competes with other processes is better than no save.
void lower_priority(const Priority& priority);

}  // namespace torch_ckpt::os
