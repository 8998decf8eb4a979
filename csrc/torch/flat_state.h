#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "index/extents.h"
#include "index/name_table.h"
#include "planning/state_template.h"
#include "torch/python_ref.h"
#include "torch/source_watch.h"
#include "torch/tensor.h"

namespace torch_ckpt::tensors {

// A flattened state dict: one row per value, with the name that torch's planners give it
// (torch.distributed.checkpoint._nested_dict.flatten_state_dict):
//
//   1. A name is the keys of dicts, as text, and the indices in lists, joined by dots.
//   2. A list is flattened if it contains a tensor or a dict, directly or in nested lists. All other
//      lists, and tuples, are values.
//
// FlatState resolves plain tensors and DTensors to their local tensors. Which part of a DTensor a
// rank has depends on mesh, placements and size, so torch is asked once for each combination.
//
// A snapshot keeps aliases instead of the tensors of the state dict, which may then change. The
// contents of the tensors are not copied; a SourceWatch detects writes to them.
//
// All methods need the GIL unless they say otherwise.
class FlatState {
 public:
  enum class Kind : std::uint8_t {
    plain,    // a plain tensor
    dtensor,  // a DTensor with a plain local tensor
    object,   // no tensor, and without methods that torch's planner calls to get its shards
    other,    // another kind of tensor, which torch must describe; or removed
  };

  /// The part of a tensor that this rank has.
  struct LocalBox {
    bool is_present = true;  // false if the rank is not in the mesh
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;   // both in extents()
    std::uint32_t layout = 0;  // in layouts(); DTensors only
  };
  /// Determines which part of a DTensor each rank of its mesh has.
  struct Layout {
    PythonRef mesh;
    PythonRef placements;
    bool has_partial = false;  // each rank has an addend, and no part
  };
  /// A value of Kind::other, as torch describes it: a tensor whose parts Python provides.
  struct Description {
    /// A part of the tensor on this rank.
    struct Part {
      std::uint32_t offsets = 0;
      std::uint32_t sizes = 0;  // both in extents()
      PythonRef value;          // the tensor or the bytes to write; set by set_item()
    };
    bool is_sharded;  // false: the tensor is a replica, and its only part is complete
    ScalarType dtype;
    std::uint64_t layout;  // hash of the mesh and the placements, or RankState::kNoLayout
    std::vector<Part> parts;
  };
  struct Row {
    PythonRef value;
    Kind kind = Kind::other;
    bool is_removed = false;
    bool requires_grad = false;
    std::uint32_t node = 0;
    std::uint32_t key = 0;   // number of its top-level key
    std::uint32_t size = 0;  // size of the global tensor, in extents()
    std::uint32_t box = 0;
    std::shared_ptr<Description> description;  // of Kind::other; nullptr until describe()
    Tensor local;

    /// True if the engine plans the value as a tensor.
    bool has_tensor() const { return kind == Kind::plain || kind == Kind::dtensor; }
  };

  /// Raises ValueError if two values have the same name, and passes on the exceptions of
  /// `local_chunks` and of keys.
  ///
  /// local_chunks: given a DTensor, returns torch's list of the chunks that this rank has.
  /// watch: if not null, this is a snapshot, and its tensors are added to the watch.
  FlatState(PyObject* state_dict, PyObject* local_chunks,
            std::shared_ptr<SourceWatch> watch = nullptr);
  ~FlatState() = default;
  FlatState(const FlatState&) = delete;
  FlatState& operator=(const FlatState&) = delete;

  std::size_t size() const { return rows_.size(); }
  const Row& row(std::size_t number) const { return rows_[number]; }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  const LocalBox& box(const Row& row) const { return boxes_[row.box]; }
  const index::ExtentsTable& extents() const { return extents_; }
  const std::vector<Layout>& layouts() const { return layouts_; }
  /// The top-level keys.
  const index::NameTable& keys() const { return keys_; }

  /// Returns the value; of a snapshot, an alias of a tensor.
  PythonRef value(const Row& row) const;
  /// Returns a new tuple of the keys and indices that lead to a value.
  PythonRef path(const Row& row) const;
  /// Returns the size of all plain tensors and DTensors, in bytes. A DTensor counts with the size
  /// of the complete tensor.
  std::uint64_t tensor_bytes() const;

  /// Describes a value of Kind::other. A row with several parts has an item for each of them.
  void describe(std::size_t number, bool requires_grad, std::span<const std::int64_t> size,
                Description description);
  /// Adds a part to a description.
  void add_part(Description& description, std::span<const std::int64_t> offsets,
                std::span<const std::int64_t> sizes);
  /// Describes the state dict for a save plan, and numbers its items (planning/state_template.h).
  /// layouts: a hash of each of layouts().
  planning::RankState to_rank_state(std::span<const std::uint64_t> layouts);

  // The items of the last to_rank_state(); without it, each row has one item.
  std::uint32_t row_of_item(std::size_t item) const {
    return rows_of_items_.empty() ? static_cast<std::uint32_t>(item) : rows_of_items_.at(item);
  }
  /// Returns the number of an item among the items of its row.
  std::size_t part_of_item(std::size_t item) const;

  /// Returns the given items without those that the engine can write as they are. The items that
  /// remain must be converted first: objects must be pickled, some tensors cloned or pickled, and
  /// the parts of described tensors looked up.
  std::vector<std::uint32_t> items_to_convert(std::span<const std::uint32_t> items) const;
  /// Returns a fingerprint (torch/fingerprint.h) of each replicated tensor, in the order of the
  /// rows; 0 for a tensor that is not plain. Runs without the GIL; the caller does not change the
  /// state in the meantime.
  std::vector<std::uint32_t> fingerprints(bool whole) const;
  /// Returns a CRC-32 of the complete local tensor of each of the given items; 0 for tensors that
  /// are not plain. Runs without the GIL, like fingerprints().
  std::vector<std::uint32_t> checksums(std::span<const std::uint32_t> items) const;

  /// Removes a value; its row stays.
  void remove(std::size_t number);
  /// Adds a value that is not in the state dict, with its path.
  void add(std::string_view name, PyObject* path, PyObject* value);
  /// Replaces a value.
  void replace(std::size_t number, PyObject* value);
  /// Replaces the value of an item.
  void set_item(std::size_t item, PyObject* value);
  /// Sets the value of a part of a described tensor.
  void set_part(std::size_t number, std::size_t part, PyObject* value);

 private:
  static constexpr std::uint32_t kRoot = 0;
  struct Node {
    std::uint32_t parent = kRoot;
    PythonRef key;            // a str or an int
    std::uint32_t bytes = 0;  // size of the key in the name
  };
  enum class Container : std::uint8_t { tensor, mapping, list, none };

  Container container_of(PyObject* value);
  bool is_terminal(PyObject* list);
  void visit(PyObject* value, std::uint32_t node);
  void visit_mapping(PyObject* mapping, std::uint32_t node);
  void visit_item(PyObject* key, PyObject* value, std::uint32_t node);
  void add_row(std::string_view name, PyObject* value, std::uint32_t node);
  void fill(Row& row, std::string_view name);
  bool fill_dtensor(Row& row, std::string_view name);
  bool is_object(PyObject* value) const;
  /// Returns the tensor to save or to fill.
  Tensor used(PyObject* tensor);
  void find_math_bits();
  /// `bytes` is the size of the key in the name.
  std::uint32_t add_node(std::uint32_t parent, PythonRef key, std::size_t bytes);
  /// Sets `nodes` to the nodes from the top-level key to the row's own.
  void nodes_to(const Row& row, std::vector<const Node*>& nodes) const;
  /// Returns the number of this rank's box of a DTensor; 0 if its part is not a single box, or an
  /// addend.
  std::uint32_t box_of(PyObject* value, std::uint32_t size);
  /// Returns the number of a layout. placements: their number in placements_.
  std::uint32_t layout_of(PyObject* mesh, PyObject* placements, std::size_t number);

  PythonRef mapping_class_;
  PythonRef dtensor_class_;
  PythonRef sharded_tensor_class_;
  PythonRef local_chunks_;
  std::shared_ptr<SourceWatch> watch_;
  std::vector<Tensor> unasked_;  // tensors whose math bits are unknown
  PythonRef placements_;         // a dict from placements to numbers
  std::unordered_map<PyTypeObject*, Container> containers_;
  std::map<std::tuple<PyObject*, std::size_t, std::uint32_t>, std::uint32_t> box_numbers_;
  std::map<std::pair<PyObject*, std::size_t>, std::uint32_t> layout_numbers_;
  std::vector<Layout> layouts_;  // keeps the meshes alive whose addresses the maps contain

  index::NameTable names_;
  index::ExtentsTable extents_;
  std::vector<Row> rows_;
  std::vector<std::uint32_t> rows_of_items_;  // empty if each row has one item
  std::vector<Node> nodes_;
  std::vector<LocalBox> boxes_;
  index::NameTable keys_;
  std::uint32_t key_ = 0;  // top-level key of the rows that are being added
  std::string prefix_;
};

}  // namespace torch_ckpt::tensors
