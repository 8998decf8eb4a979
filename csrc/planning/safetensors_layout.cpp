#include "planning/safetensors_layout.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "format/checksum_table.h"
#include "format/crc32.h"
#include "format/little_endian.h"
#include "format/part_sums.h"
#include "os/file.h"
#include "planning/box_runs.h"

namespace torch_ckpt::planning {
namespace {

using format::Dtype;
using format::SafeTensor;

std::uint64_t bytes_of(const SafeTensor& tensor) {
  return std::accumulate(tensor.sizes.begin(), tensor.sizes.end(),
                         std::uint64_t{tensor.dtype->item_bytes}, std::multiplies<>());
}

/// Distributes the tensors over files, in order.
std::vector<std::vector<std::size_t>> split(std::span<const SafeTensor> tensors,
                                            std::uint64_t max_bytes) {
  std::vector<std::vector<std::size_t>> files(1);
  std::uint64_t used = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t bytes = bytes_of(tensors[i]);
    if (max_bytes != 0 && !files.back().empty() && bytes > max_bytes - std::min(used, max_bytes)) {
      files.emplace_back();
      used = 0;
    }
    files.back().push_back(i);
    used += bytes;
  }
  return files;
}

std::string file_name(std::size_t number, std::size_t count, const std::string& tag) {
  if (count == 1 && tag.empty()) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "-%05zu-of-%05zu.safetensors", number + 1, count);
  return (tag.empty() ? "model" : "model-" + tag) + name;
}

std::string index_of(std::span<const SafeTensor> tensors,
                     std::span<const SafetensorsLayout::File> files,
                     std::span<const SafetensorsLayout::Place> places) {
  std::uint64_t total = 0;
  std::map<std::string_view, std::string_view> file_of;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    total += bytes_of(tensors[i]);
    file_of[tensors[i].name] = files[places[i].file].name;
  }
  std::string json = "{\n  \"metadata\": {\n    \"total_size\": " + std::to_string(total) +
                     "\n  },\n  \"weight_map\": {";
  for (const auto& [name, file] : file_of) {
    json += json.ends_with('{') ? "\n    " : ",\n    ";
    format::append_json_string(json, name);
    json += ": ";
    format::append_json_string(json, file);
  }
  return json + "\n  }\n}\n";
}

}  // namespace

Result<SafetensorsLayout> SafetensorsLayout::of(std::vector<SafeTensor> tensors,
                                                const Options& options) {
  std::unordered_set<std::string_view> names;
  for (const SafeTensor& tensor : tensors) {
    TC_TRY(format::require_safe(tensor.name, tensor.dtype, tensor.sizes));
    if (!names.insert(tensor.name).second) {
      Error error = format_error(Errc::unsavable, "two tensors would get this name; rename one");
      error.subject = tensor.name;
      return error;
    }
  }
  SafetensorsLayout layout;
  layout.places_.resize(tensors.size());
  std::vector<std::vector<std::size_t>> files = split(tensors, options.max_shard_bytes);
  for (std::vector<std::size_t>& in_file : files) {
    const auto file = static_cast<std::uint32_t>(layout.files_.size());
    std::ranges::sort(in_file, [&](std::size_t a, std::size_t b) {
      return std::forward_as_tuple(tensors[b].dtype->item_bytes, tensors[a].name) <
             std::forward_as_tuple(tensors[a].dtype->item_bytes, tensors[b].name);
    });
    std::vector<SafeTensor> ordered;
    for (const std::size_t i : in_file) ordered.push_back(tensors[i]);
    auto header =
        format::encode_safetensors_header(ordered, options.metadata, os::kDirectAlignment);
    if (!header) return header.error();
    const std::uint64_t bytes =
        ordered.empty() ? header->size() : ordered.back().begin + ordered.back().bytes;
    for (std::size_t i = 0; i < in_file.size(); ++i) {
      layout.places_[in_file[i]] = {file, ordered[i].begin};
    }
    layout.files_.push_back(
        {file_name(file, files.size(), options.tag), std::move(*header), bytes});
  }
  if (files.size() > 1 || !options.tag.empty())
    layout.index_ = index_of(tensors, layout.files_, layout.places_);
  layout.tensors_ = std::move(tensors);
  return layout;
}

Result<std::vector<std::string>> SafetensorsLayout::checksum_tables(
    std::span<const WrittenParts> written) const {
  std::map<std::string_view, std::vector<format::PartSums>> parts;
  for (const auto& [file, encoded] : written) {
    auto decoded = format::decode_part_sums(std::as_bytes(std::span(encoded)));
    if (!decoded) return decoded.error();
    auto& of_file = parts[file];
    std::move(decoded->begin(), decoded->end(), std::back_inserter(of_file));
  }
  std::vector<std::map<std::uint64_t, std::uint64_t>> bytes(files_.size());  // by offset
  for (std::size_t i = 0; i < files_.size(); ++i) {
    for (const format::PartSums& part : parts[files_[i].name]) {
      bytes[i][part.tensor] += part.bytes;
    }
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::uint64_t wanted = bytes_of(tensors_[i]);
    const std::uint64_t found = wanted == 0 ? 0 : bytes[places_[i].file][places_[i].begin];
    if (found == wanted) continue;
    Error error = format_error(
        Errc::internal, "the ranks have written " + std::to_string(found) + " of " +
                            std::to_string(wanted) +
                            " bytes: their parts do not cover the tensor exactly once, or ranks "
                            "have different options");
    error.subject = tensors_[i].name;
    return error;
  }
  std::vector<std::string> tables;
  for (const File& file : files_) {
    const auto sums = format::join_part_sums(parts[file.name]);
    if (!sums) return sums.error();
    tables.push_back(format::encode_checksum_table(*sums));
  }
  return tables;
}

std::vector<format::SafeChecksums> checksums_of(std::span<const SafetensorsLayout::File> files,
                                                std::vector<std::string> tables,
                                                std::span<const SafetensorsLayout::Extra> extras) {
  std::vector<format::SafeChecksums> all;
  const auto add = [&](const std::string& name, std::uint64_t bytes, std::string_view contents) {
    all.push_back({name, bytes, format::crc32(0, std::as_bytes(std::span(contents))), {}});
  };
  for (std::size_t i = 0; i < files.size(); ++i) {
    add(files[i].name, files[i].bytes, files[i].header);
    if (i < tables.size()) all.back().table = std::move(tables[i]);
  }
  for (const SafetensorsLayout::Extra& extra : extras) {
    add(extra.name, extra.contents.size(), extra.contents);
  }
  return all;
}

const Dtype* stored_dtype(const Dtype* dtype, const Dtype* cast) {
  const bool is_floating =
      dtype != nullptr && (dtype->name.starts_with("float") || dtype->name.starts_with("bfloat"));
  return is_floating && cast != nullptr && dtype->name != "float4_e2m1fn_x2" ? cast : dtype;
}

Result<std::vector<SafeTensor>> safe_tensors_of(const GlobalPlan& plan,
                                                std::span<const std::string> names,
                                                const Dtype* cast) {
  std::vector<SafeTensor> tensors(plan.names());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const StateTemplate& state = plan.first_template(i);
    const StateTemplate::Row& row = state.row(plan.first_row(i));
    if (row.is_described) {
      Error error = format_error(Errc::unsavable,
                                 "safetensors files hold only plain tensors and DTensors; convert "
                                 "the value first, or leave it out");
      error.subject = plan.name(i);
      return error;
    }
    if (row.kind != StateTemplate::Kind::tensor && row.kind != StateTemplate::Kind::shard) {
      Error error = format_error(Errc::unsavable,
                                 "safetensors files hold only tensors; save this value elsewhere");
      error.subject = plan.name(i);
      return error;
    }
    tensors[i].name = names.empty() ? std::string(plan.name(i)) : names[i];
    tensors[i].dtype = stored_dtype(format::find_dtype(state.dtype(row)), cast);
    const auto sizes = state.sizes(row);
    tensors[i].sizes.assign(sizes.begin(), sizes.end());
  }
  return tensors;
}

std::vector<std::vector<OwnedPart>> owned_parts_of(const GlobalPlan& plan) {
  std::vector<std::vector<OwnedPart>> parts(plan.ranks());
  for (std::size_t rank = 0; rank < plan.ranks(); ++rank) {
    const RankState& state = plan.of_rank(rank);
    const auto owned = plan.owned(rank);
    parts[rank].reserve(owned.size());
    for (std::size_t i = 0; i < owned.size(); ++i) {
      OwnedPart& part = parts[rank].emplace_back();
      part.tensor = plan.entry(rank, i);
      const std::uint32_t box = state.box(owned[i]);
      if (box == RankState::kNone) {
        const auto sizes = state.state().sizes(state.row(owned[i]));
        part.sizes.assign(sizes.begin(), sizes.end());
        part.offsets.assign(sizes.size(), 0);
      } else {
        const auto offsets = state.offsets(box);
        const auto sizes = state.sizes(box);
        part.offsets.assign(offsets.begin(), offsets.end());
        part.sizes.assign(sizes.begin(), sizes.end());
      }
    }
  }
  return parts;
}

std::vector<FilePart> file_parts_of(const SafetensorsLayout& layout,
                                    std::span<const std::vector<OwnedPart>> parts) {
  std::vector<FilePart> of_files;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (const OwnedPart& part : parts[rank]) {
      const SafeTensor& tensor = layout.tensors()[part.tensor];
      const auto [file, begin] = layout.places()[part.tensor];
      const auto runs =
          BoxRuns::of(tensor.sizes, part.offsets, part.sizes, tensor.dtype->item_bytes);
      if (!runs) continue;
      of_files.push_back(
          {rank, file, begin + runs->begin(), begin + runs->end(), runs->run_bytes()});
    }
  }
  return of_files;
}

std::vector<RankPlaces> RankPlaces::of(
    const SafetensorsLayout& layout, std::span<const std::vector<OwnedPart>> parts,
    std::span<const std::optional<os::MemoryFile::Address>> offers) {
  std::vector<RankPlaces> places(parts.size());
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (const SafetensorsLayout::File& file : layout.files()) {
      places[rank].files.push_back({file.name, file.bytes});
    }
    for (const OwnedPart& part : parts[rank]) {
      places[rank].places.push_back(layout.places()[part.tensor]);
    }
  }
  const auto collective = choose_collective_ranges(file_parts_of(layout, parts), offers);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    places[rank].collective = collective[rank];
  }
  return places;
}

// places := are_packed:u8 files:u32 file* tensors:u32 place* has_collective:u8 collective?
// file   := name_bytes:u32 name bytes:u64 head_bytes:u32 head
// place  := file:u32 begin:u64
std::string RankPlaces::encode() const {
  std::string out;
  format::put(out, are_packed ? 1 : 0, 1);
  format::put(out, files.size(), 4);
  for (const File& file : files) {
    format::put_text32(out, file.name);
    format::put(out, file.bytes, 8);
    format::put_text32(out, file.head);
  }
  format::put(out, places.size(), 4);
  for (const SafetensorsLayout::Place& place : places) {
    format::put(out, place.file, 4);
    format::put(out, place.begin, 8);
  }
  format::put(out, collective != nullptr ? 1 : 0, 1);
  if (collective != nullptr) collective->encode_to(out);
  return out;
}

Result<RankPlaces> RankPlaces::decode(std::string_view bytes) {
  format::ByteReader reader(std::as_bytes(std::span(bytes)));
  RankPlaces of_rank;
  bool is_complete = true;
  of_rank.are_packed = reader.number(1) != 0;
  for (std::uint64_t left = reader.number(4); left > 0 && !reader.has_failed(); --left) {
    File& file = of_rank.files.emplace_back();
    file.name = reader.text32();
    file.bytes = reader.number(8);
    file.head = reader.text32();
  }
  for (std::uint64_t left = reader.number(4); left > 0 && !reader.has_failed(); --left) {
    SafetensorsLayout::Place& place = of_rank.places.emplace_back();
    place.file = static_cast<std::uint32_t>(reader.number(4));
    place.begin = reader.number(8);
    is_complete = is_complete && place.file < of_rank.files.size();
  }
  if (reader.number(1) != 0) {
    auto collective = CollectiveRanges::decode_from(reader);
    if (!collective) return collective.error();
    of_rank.collective = std::make_shared<const CollectiveRanges>(std::move(*collective));
  }
  if (!is_complete || reader.has_failed() || reader.left() != 0) {
    return format_error(Errc::frame_damaged, "the places of a rank's tensors are damaged");
  }
  return of_rank;
}

}  // namespace torch_ckpt::planning
