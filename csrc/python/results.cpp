#include "python/results.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/memory.h"
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using engine::ProcessChannel;

std::chrono::milliseconds milliseconds_of(double seconds) {
  constexpr double kLongest = 1e9;
  return std::chrono::milliseconds(
      static_cast<std::int64_t>(std::clamp(seconds, 0.0, kLongest) * 1000.0));
}

// The fields of an address, in the order of the Python tuple.
auto fields(auto& address) {
  return std::tie(address.process, address.memory, address.wake, address.wake_pipe,
                  address.memory_file.device, address.memory_file.number,
                  address.memory_file.born_s, address.memory_file.born_ns);
}
using Address = std::tuple<std::int64_t, int, int, std::uint64_t, std::uint64_t, std::uint64_t,
                           std::int64_t, std::uint32_t>;

std::shared_ptr<ProcessChannel> at(const Address& given) {
  os::Mailbox::Address address;
  fields(address) = given;
  return std::make_shared<ProcessChannel>(address);
}

auto take_objects(ProcessChannel& channel) {
  return list_of(without_gil([&] { return channel.take_objects(); }),
                 [](const std::string& object) { return py::bytes(object); });
}

Result<> wait(ProcessChannel& channel, double seconds) {
  return channel.wait(milliseconds_of(seconds));
}

std::optional<std::variant<WrittenFiles, Bytes>> wait_for_files(ProcessChannel& channel,
                                                                double seconds) {
  const auto outcome =
      without_gil([&] { return channel.wait_for_files(milliseconds_of(seconds)); });
  if (!outcome) return std::nullopt;
  if (outcome->object) return Bytes{*outcome->object};
  return WrittenFiles{outcome->files};
}

using Item = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint32_t>;
using FileOfPython = std::tuple<std::string, Bytes, std::vector<Item>>;

WrittenFiles written_files(const std::vector<FileOfPython>& given) {
  std::vector<format::FileResult> files;
  for (const auto& [name, table, items] : given) {
    format::FileResult& file = files.emplace_back();
    file.name = name;
    file.checksum_table = table;
    std::vector<format::ItemLocation> locations;
    for (const auto& [item, offset, length, crc] : items) {
      locations.push_back({item, offset, length});
      file.crcs.push_back(crc);
    }
    file.locations = format::ItemLocations(locations);
  }
  return WrittenFiles{std::move(files)};
}

std::size_t count_of(const WrittenFiles& written) {
  std::size_t items = 0;
  for (const format::FileResult& file : written.files) items += file.locations.size();
  return items;
}

Typed<"list[tuple[str, int, int, int]]"> locations_of(const WrittenFiles& written,
                                                      std::size_t first) {
  const std::size_t items = count_of(written);
  py::list locations(items - std::min(first, items));
  std::vector<bool> seen(items);
  for (const format::FileResult& file : written.files) {
    const py::str name(file.name);
    std::size_t i = 0;
    for (const auto& [item, offset, length] : file.locations.decoded()) {
      const std::uint32_t crc = file.crcs[i++];
      if (item >= items || seen[item]) {
        throw py::index_error("expected exactly one result per item, numbered from 0");
      }
      seen[item] = true;
      if (item >= first) locations[item - first] = py::make_tuple(name, offset, length, crc);
    }
  }
  return py::object(locations);
}

auto names_of(const WrittenFiles& written) {
  return list_of(written.files, [](const format::FileResult& file) { return py::str(file.name); });
}

auto tables_of(const WrittenFiles& written) {
  py::typing::Dict<py::str, py::bytes> tables;
  for (const format::FileResult& file : written.files) {
    tables[py::str(file.name)] = py::bytes(file.checksum_table);
  }
  return tables;
}

py::tuple frames_of(const WrittenFiles& written) {
  return py::make_tuple(py::bytes(format::encode_files(written.files)));
}

WrittenFiles from_frames(const py::tuple& state) {
  const auto encoded = state[0].cast<py::bytes>();
  const std::string_view frames = encoded;
  return WrittenFiles{unwrap(format::decode_files(std::as_bytes(std::span(frames))))};
}

}  // namespace

void bind_results(py::module_& module) {
  py::class_<WrittenFiles>(
      module, "WrittenFiles",
      "The files that one rank has written in one save; its length is the number of items.\n\n"
      "It can be pickled. ``files`` has the name and checksum table of each file, and the number, "
      "offset, length and CRC-32 of each item in it.")
      .def(py::init(&written_files), "files"_a)
      .def_property_readonly("names", &names_of)
      .def_property_readonly("tables", &tables_of, "Checksum tables by file name.")
      .def("locations", &locations_of, "first"_a = 0,
           "File name, offset, length in bytes, and CRC-32 of each item from ``first`` on.")
      .def("__len__", &count_of)
      .def(py::pickle(&frames_of, &from_frames));
  py::class_<ProcessChannel, std::shared_ptr<ProcessChannel>>(
      module, "ProcessChannel",
      "A results channel between processes, in memory. Only the wait methods wait.\n\n"
      "Methods raise OSError if a system call fails: the owner has ended, or there is no memory or "
      "no free descriptor.")
      .def(py::init([] { return unwrap(ProcessChannel::create()); }), NoGil())
      .def_static("at", &at, "address"_a, "The channel of another process, to send to.")
      .def_property_readonly(
          "address", [](ProcessChannel& channel) -> Address { return fields(channel.address()); })
      .def("send_object", &ProcessChannel::send_object, "pickled"_a, NoGil())
      .def("begin", &ProcessChannel::announce, "what"_a, NoGil(),
           "Announces that this process will send an object. ``what`` describes it for messages.")
      .def("take_objects", &take_objects,
           "Objects that were sent since the last call, oldest first.")
      .def("take_missed", &ProcessChannel::take_dead_senders, NoGil(),
           "Process id and ``what`` of each process that ended between ``begin`` and "
           "``send_object``.\n\n"
           "Each is returned once.")
      .def("wait", &wait, "seconds"_a, NoGil(),
           "Waits for an object, a call of ``wake``, or the end of a process after its ``begin``.")
      .def("wake", &ProcessChannel::wake, NoGil())
      .def("wait_for_files", &wait_for_files, "seconds"_a,
           "Waits, in a forked child, for the results of a save of the parent.\n\n"
           "Returns the object that was sent in their place as bytes, or None after ``seconds``. "
           "Raises the save's error, and CheckpointError if the parent has died.");
}

}  // namespace torch_ckpt::python
