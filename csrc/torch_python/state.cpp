#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "planning/state_template.h"
#include "python/gil.h"
#include "python/text.h"
#include "torch/flat_state.h"
#include "torch/source_watch.h"
#include "torch/tensor_checks.h"
#include "torch_python/bindings.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using planning::RankState;
using tensors::FlatState;
using tensors::PythonRef;
using tensors::SourceWatch;

py::object object_of(PythonRef object) {
  return py::reinterpret_steal<py::object>(object.release());
}

const FlatState::Row& row_of(const FlatState& state, std::size_t number) {
  if (number >= state.size()) throw py::index_error("row number out of range");
  return state.row(number);
}

/// Returns the inputs of a plan: the template of the state, and this rank's shards.
py::tuple contents_of(const FlatState& state) {
  const RankState here = state.to_rank_state();
  const auto [of_template, of_rank] =
      without_gil([&] { return std::pair(here.state().encode(), here.encode()); });
  return py::make_tuple(py::bytes(of_template), py::bytes(of_rank));
}

/// Returns the names and the values of rows, and the positions of the values that the engine cannot
/// write as they are, so that the caller must convert them first.
py::tuple sources_of(const FlatState& state, const std::vector<std::size_t>& rows) {
  py::list names(rows.size());
  py::list values(rows.size());
  py::list others;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= state.size()) throw py::index_error("row number out of range");
    const FlatState::Row& row = state.row(rows[i]);
    names[i] = text_of(state.name(rows[i]));
    values[i] = row.kind == FlatState::Kind::dtensor
                    ? py::reinterpret_steal<py::object>(THPVariable_Wrap(row.local))
                    : py::reinterpret_borrow<py::object>(row.value.get());
    const bool is_written_as_it_is = row.kind != FlatState::Kind::other &&
                                     tensors::is_plain(row.local) &&
                                     (!row.local.is_cuda() || tensors::is_dense(row.local));
    if (!is_written_as_it_is) others.append(i);
  }
  return py::make_tuple(names, values, others);
}

}  // namespace

void bind_state(py::module_& module) {
  py::class_<SourceWatch, std::shared_ptr<SourceWatch>>(module, "SourceWatch")
      .def(py::init<>())
      .def(
          "add",
          [](SourceWatch& watch, const py::str& name, const at::Tensor& tensor,
             const py::object& holder, const py::str& attribute) {
            if (holder.is_none()) return watch.add(bytes_of(name), tensor);
            watch.add(bytes_of(name), tensor, PythonRef::to(holder.ptr()),
                      PythonRef::to(attribute.ptr()));
          },
          py::arg("name"), py::arg("tensor"), py::arg("holder") = py::none(),
          py::arg("attribute") = "")
      .def("changed",
           [](const SourceWatch& watch) {
             py::list names;
             for (const std::string& name : watch.changed()) names.append(text_of(name));
             return names;
           })
      .def_property_readonly("devices", &SourceWatch::devices)
      .def("release", &SourceWatch::release);
  py::class_<FlatState>(module, "FlatState")
      .def(py::init([](const py::object& state_dict, const py::object& chunks_here,
                       std::shared_ptr<SourceWatch> watch) {
             return std::make_unique<FlatState>(state_dict.ptr(), chunks_here.ptr(),
                                                std::move(watch));
           }),
           py::arg("state_dict"), py::arg("chunks_here"), py::arg("watch") = nullptr)
      .def("contents", &contents_of)
      .def("sources", &sources_of, py::arg("rows"))
      .def("__len__", &FlatState::size)
      .def("names",
           [](const FlatState& state) {
             py::list names(state.size());
             for (std::size_t i = 0; i < state.size(); ++i) names[i] = text_of(state.name(i));
             return names;
           })
      .def(
          "name",
          [](const FlatState& state, std::size_t row) {
            row_of(state, row);
            return text_of(state.name(row));
          },
          py::arg("row"))
      .def(
          "value",
          [](const FlatState& state, std::size_t row) {
            return py::reinterpret_borrow<py::object>(row_of(state, row).value.get());
          },
          py::arg("row"))
      .def(
          "path",
          [](const FlatState& state, std::size_t row) {
            return object_of(state.path(row_of(state, row)));
          },
          py::arg("row"))
      .def("others",
           [](const FlatState& state) {
             py::list rows;
             for (std::size_t i = 0; i < state.size(); ++i) {
               const FlatState::Row& row = state.row(i);
               if (row.kind == FlatState::Kind::other && !row.is_removed) rows.append(i);
             }
             return rows;
           })
      .def("plain",
           [](const FlatState& state) {
             py::list values;
             for (std::size_t i = 0; i < state.size(); ++i) {
               const FlatState::Row& row = state.row(i);
               if (row.kind == FlatState::Kind::plain) {
                 values.append(py::reinterpret_borrow<py::object>(row.value.get()));
               }
             }
             return values;
           })
      .def("on_meta",
           [](const FlatState& state) {
             py::list rows;
             for (std::size_t i = 0; i < state.size(); ++i) {
               const FlatState::Row& row = state.row(i);
               if (row.local.defined() && row.local.is_meta()) rows.append(i);
             }
             return rows;
           })
      .def(
          "is_object",
          [](const FlatState& state, std::size_t row) {
            return state.is_object(row_of(state, row));
          },
          py::arg("row"))
      .def(
          "add",
          [](FlatState& state, const py::str& name, const py::tuple& path,
             const py::object& value) { state.add(bytes_of(name), path.ptr(), value.ptr()); },
          py::arg("name"), py::arg("path"), py::arg("value"))
      .def(
          "remove",
          [](FlatState& state, std::size_t row) {
            row_of(state, row);
            state.remove(row);
          },
          py::arg("row"))
      .def(
          "replace",
          [](FlatState& state, std::size_t row, const py::object& value) {
            row_of(state, row);
            state.replace(row, value.ptr());
          },
          py::arg("row"), py::arg("value"));
}

}  // namespace torch_ckpt::python
