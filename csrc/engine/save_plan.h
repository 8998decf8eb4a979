#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/save_session.h"
#include "error.h"
#include "format/tensor_pickle.h"
#include "planning/buckets.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

struct SaveItem {
  std::string name;  // fully qualified name; decides on which side of a separation hint it goes
  staging::Source source;
  std::optional<format::TensorHeader>
      tensor;  // nullopt: the source's bytes are written as they are
};

struct NamingOptions {
  std::string prefix;             // "__{rank}_"
  planning::BucketCount buckets;  // files, where items share files
  bool file_per_item = false;     // one file for each item instead
  std::string separation_hint;
};

/// Where an item went.
struct ItemPlace {
  std::size_t file = 0;
  std::size_t index = 0;  // within the file's image
};

struct SavePlan {
  std::vector<FileJob> files;
  std::vector<std::string> file_names;  // relative to the directory
  std::vector<ItemPlace> places;        // by item
};

/// Distributes items over files and lays the files out; no byte of a source is touched. Buckets
/// that get nothing make no file.
Result<SavePlan> plan_save(std::vector<SaveItem> items, const NamingOptions& naming);

}  // namespace torch_ckpt::engine
