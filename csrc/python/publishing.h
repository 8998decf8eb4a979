#pragma once

#include <string>

#include "directory/lease.h"
#include "directory/publish.h"
#include "python/errors.h"
#include "python/released_gil.h"

namespace torch_ckpt::python {

inline void warn(const directory::Warnings& warnings) {
  for (const std::string& text : warnings) {
    pybind11::module_::import("torch_ckpt._base.log").attr("warn")(os_text(text));
  }
}

/// Calls a function that removes files, and issues its warnings. The function never fails.
template <class Function>
void run_and_warn(Function function) {
  directory::Warnings warnings;
  {
    const ReleasedGil released;
    function(warnings);
  }
  warn(warnings);
}

/// Raises OSError if nothing was published, like os.rename.
inline void raise_unpublished(const directory::PublishOutcome& outcome) {
  if (outcome.state == directory::PublishState::not_published) throw Failure(outcome.error);
  if (outcome.state == directory::PublishState::durability_uncertain) raise(outcome);
}

}  // namespace torch_ckpt::python
