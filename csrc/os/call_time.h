#pragma once

namespace torch_ckpt::os {

/// Processor time in seconds that the current thread has spent in calls of the engine. The thread
/// calls begin() and end() around such calls.
class CallTime {
 public:
  static double seconds();
  static void begin();
  static void end();
};

}  // namespace torch_ckpt::os
