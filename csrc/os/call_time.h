#pragma once

namespace torch_ckpt::os {

/// CPU time in seconds that the current thread has spent in calls to the engine. The thread calls
/// begin() before and end() after each such call.
class CallTime {
 public:
  static double seconds();
  static void begin();
  static void end();
};

}  // namespace torch_ckpt::os
