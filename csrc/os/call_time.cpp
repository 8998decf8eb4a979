#include "os/call_time.h"

#include <time.h>

namespace torch_ckpt::os {
namespace {

// begin() subtracts the current CPU time, and end() adds it. So the value is valid only between
// calls.
thread_local double seconds_in_calls = 0;

double processor_time() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

double CallTime::seconds() { return seconds_in_calls; }

void CallTime::begin() { seconds_in_calls -= processor_time(); }

void CallTime::end() { seconds_in_calls += processor_time(); }

}  // namespace torch_ckpt::os
