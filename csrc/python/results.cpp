#include "python/results.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <tuple>
#include <utility>

#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/memory.h"

namespace py = pybind11;

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

py::list take_objects(ProcessChannel& channel) {
  py::list taken;
  for (const std::string& object : without_gil([&] { return channel.take_objects(); })) {
    taken.append(py::bytes(object));
  }
  return taken;
}

Result<> wait(ProcessChannel& channel, double seconds) {
  return channel.wait(milliseconds_of(seconds));
}

/// Returns the files, or the object that was sent instead. Returns None after `seconds`.
py::object wait_for_files(ProcessChannel& channel, double seconds) {
  const auto outcome =
      without_gil([&] { return channel.wait_for_files(milliseconds_of(seconds)); });
  if (!outcome) return py::none();
  if (outcome->object) return py::bytes(*outcome->object);
  return py::cast(WrittenFiles{outcome->files});
}

using FileOfPython =
    std::tuple<std::string, std::string, std::vector<std::array<std::uint64_t, 4>>>;

WrittenFiles written_files(const std::vector<FileOfPython>& given) {
  std::vector<format::FileResult> files;
  for (const auto& [name, table, items] : given) {
    format::FileResult& file = files.emplace_back();
    file.name = name;
    file.checksum_table = table;
    std::vector<format::ItemLocation> locations;
    for (const auto& [item, offset, length, crc] : items) {
      locations.push_back({item, offset, length});
      file.crcs.push_back(static_cast<std::uint32_t>(crc));
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

/// Returns (file name, offset, length, payload CRC-32) for each item, beginning with item `first`.
py::list locations_of(const WrittenFiles& written, std::size_t first) {
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
  return locations;
}

py::list names_of(const WrittenFiles& written) {
  py::list names;
  for (const format::FileResult& file : written.files) names.append(py::str(file.name));
  return names;
}

/// Returns the checksum tables by file name.
py::dict tables_of(const WrittenFiles& written) {
  py::dict tables;
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

std::shared_ptr<ProcessChannel> channel_of(const py::object& channel) {
  if (channel.is_none()) return nullptr;
  return channel.cast<std::shared_ptr<ProcessChannel>>();
}

void bind_results(py::module_& module) {
  py::class_<WrittenFiles>(module, "WrittenFiles")
      .def(py::init(&written_files), py::arg("files"))
      .def_property_readonly("names", &names_of)
      .def_property_readonly("tables", &tables_of)
      .def("locations", &locations_of, py::arg("first") = 0)
      .def("__len__", &count_of)
      .def(py::pickle(&frames_of, &from_frames));
  py::class_<ProcessChannel, std::shared_ptr<ProcessChannel>>(module, "ProcessChannel")
      .def(py::init([] { return unwrap(ProcessChannel::create()); }), NoGil())
      .def_static("at", &at, py::arg("address"))
      .def_property_readonly(
          "address", [](ProcessChannel& channel) -> Address { return fields(channel.address()); })
      .def("send_object", &ProcessChannel::send_object, py::arg("pickled"), NoGil())
      .def("begin", &ProcessChannel::announce, py::arg("what"), NoGil())
      .def("take_objects", &take_objects)
      .def("take_missed", &ProcessChannel::take_dead_senders, NoGil())
      .def("wait", &wait, py::arg("seconds"), NoGil())
      .def("wake", &ProcessChannel::wake, NoGil())
      .def("wait_for_files", &wait_for_files, py::arg("seconds"));
}

}  // namespace torch_ckpt::python
