#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/save_session.h"
#include "error.h"
#include "format/tensor_pickle.h"
#include "planning/buckets.h"
#include "staging/source.h"

namespace torch_ckpt::engine {

struct SaveItem {
  std::string name;  // fully qualified name, compared with NamingOptions::separation_hint
  staging::Source source;
  std::shared_ptr<const format::TensorHeader> tensor;  // nullptr: write only the source's bytes
};

/// A part of a tensor in a file that several ranks write.
struct SavePart {
  staging::Source source;  // in row-major order
  std::size_t file = 0;
  PartPlace place;
};

struct NamingOptions {
  std::string prefix;             // "__{rank}_"
  planning::BucketCount buckets;  // number of files
  bool file_per_item = false;     // one file per item; ignores `buckets`
  std::string separation_hint;    // items whose names begin with this go to separate files
};

/// The location of an item in the layout.
struct ItemLocation {
  std::size_t file = 0;
  std::size_t index = 0;  // in the file's image
};

struct SaveLayout {
  std::vector<FileJob> files;
  std::vector<std::string> file_names;  // relative to the directory
  std::vector<ItemLocation> locations;  // by item
};

/// Distributes items over files and lays out the files. Does not copy bytes from the sources. An
/// empty bucket gets no file.
Result<SaveLayout> lay_out_save(std::vector<SaveItem> items, const NamingOptions& naming);

/// Lays out this rank's parts of files that several ranks write. A file of which the rank has no
/// part is omitted.
SaveLayout lay_out_parts(std::vector<SavePart> parts, const std::vector<SharedFile>& files);

}  // namespace torch_ckpt::engine
