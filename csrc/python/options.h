#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/load_session.h"
#include "python/types.h"

/// Converts the option direct_io: True, False or "auto".
template <>
struct pybind11::detail::type_caster<torch_ckpt::engine::DirectIo> {
  using DirectIo = torch_ckpt::engine::DirectIo;
  PYBIND11_TYPE_CASTER(DirectIo, const_name("bool | str"));

  bool load(handle object, bool) {
    if (isinstance<bool_>(object)) {
      value = object.ptr() == Py_True ? DirectIo::on : DirectIo::off;
    } else if (isinstance<str>(object) && object.equal(str("auto"))) {
      value = DirectIo::automatic;
    } else {
      throw value_error("direct_io must be True, False or \"auto\", got " +
                        std::string(repr(object)));
    }
    return true;
  }
};

namespace torch_ckpt::python {

using Background = Typed<"torch_ckpt.options.Background | None">;
using ReadOptions = Typed<"torch_ckpt.options.ReadOptions">;
/// A function to which a session passes the number of bytes that are done.
using Progress = Typed<"collections.abc.Callable[[int], None] | None">;

/// Returns the threads of a background, which must not be None.
inline engine::PoolSpec threads_of(const Background& background) {
  engine::PoolSpec spec;
  spec.priority.nice = background.attr("nice").cast<int>();
  spec.priority.idle_io = background.attr("idle_io").cast<bool>();
  spec.count = background.attr("threads").cast<std::size_t>();
  return spec;
}

/// The CUDA device and handle of each event.
using Events = std::vector<std::pair<int, std::uintptr_t>>;
inline std::vector<staging::ReadyEvent> ready_events(const Events& events) {
  std::vector<staging::ReadyEvent> ready;
  for (const auto& [device, event] : events) {
    ready.push_back({device, reinterpret_cast<void*>(event)});
  }
  return ready;
}

/// Converts options. Their `verify` applies only to loads.
template <class Options>
Options read_options(const ReadOptions& given) {
  Options options;
  options.threads = given.attr("threads").cast<std::size_t>();
  options.max_scratch_bytes = given.attr("max_inflight_bytes").cast<std::uint64_t>();
  options.direct_io = given.attr("direct_io").cast<engine::DirectIo>();
  return options;
}

}  // namespace torch_ckpt::python
