#pragma once

namespace torch_ckpt::os {

/// How much a thread asks of the machine beside others.
struct Priority {
  int nice = 0;          // 0 to 19; 19 asks least of the processors
  bool idle_io = false;  // its reads and writes wait for everybody else's

  bool operator==(const Priority&) const = default;
};

/// Gives the calling thread this priority. Only ever lowers it: raising needs privileges. What the
/// system refuses is left as it was, since a save that competes is better than none.
void lower_priority(const Priority& priority);

}  // namespace torch_ckpt::os
