#include "planning/object_files.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "checked_math.h"
#include "format/little_endian.h"

namespace torch_ckpt::planning {
namespace {

Error damaged() {
  return format_error(Errc::frame_damaged, "the description of a file's parts is damaged");
}

void put_all(std::string& out, std::span<const std::uint64_t> numbers) {
  for (const std::uint64_t number : numbers) format::put(out, number, 8);
}

void read_all(format::ByteReader& reader, std::uint64_t count, std::vector<std::uint64_t>& into) {
  for (; count > 0 && !reader.has_failed(); --count) into.push_back(reader.number(8));
}

}  // namespace

Result<> FileAssembly::add_stream(std::size_t rank, std::span<const Part> parts) {
  Stream& stream = streams_.emplace_back();
  stream.rank = rank;
  std::uint64_t offset = 0;
  for (const Part& part : parts) {
    auto runs = BoxRuns::of(part.sizes, part.offsets, part.lengths, part.item_bytes);
    if (!runs || part.tensor < head_.size() || !inside(part.tensor, runs->tensor_bytes(), bytes_)) {
      return damaged();
    }
    const std::uint64_t bytes = runs->bytes();
    stream.parts.push_back({part, std::move(*runs), offset});
    offset += bytes;
  }
  return {};
}

std::uint64_t FileAssembly::bytes_of(std::size_t stream) const {
  const auto& parts = streams_.at(stream).parts;
  return parts.empty() ? 0 : parts.back().offset + parts.back().runs.bytes();
}

std::vector<FileAssembly::Range> FileAssembly::ranges(std::uint64_t begin,
                                                      std::uint64_t end) const {
  std::vector<Range> found;
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    const auto& parts = streams_[i].parts;
    const auto first = std::ranges::partition_point(parts, [&](const Placed& placed) {
      return placed.part.tensor + placed.runs.tensor_bytes() <= begin;
    });
    for (auto it = first; it != parts.end() && it->part.tensor < end; ++it) {
      const std::uint64_t from =
          it->runs.bytes_before(begin - std::min(begin, it->part.tensor)) + it->offset;
      const std::uint64_t to = it->runs.bytes_before(end - it->part.tensor) + it->offset;
      if (from == to) continue;
      const bool follows = !found.empty() && found.back().stream == i &&
                           found.back().offset + found.back().bytes == from;
      if (follows) {
        found.back().bytes += to - from;
      } else {
        found.push_back({i, from, to - from});
      }
    }
  }
  return found;
}

void FileAssembly::copy_head(std::uint64_t begin, std::span<std::byte> out) const {
  if (begin >= head_.size()) return;
  const auto part = std::as_bytes(std::span(head_)).subspan(begin);
  std::memcpy(out.data(), part.data(), std::min(part.size(), out.size()));
}

Result<> FileAssembly::copy(const Range& range, std::span<const std::byte> data,
                            std::uint64_t begin, std::span<std::byte> out) const {
  if (range.stream >= streams_.size() || data.size() != range.bytes) return damaged();
  const auto& parts = streams_[range.stream].parts;
  bool is_inside = true;
  std::uint64_t copied = 0;
  const auto first = std::ranges::partition_point(parts, [&](const Placed& placed) {
    return placed.offset + placed.runs.bytes() <= range.offset;
  });
  for (auto it = first; it != parts.end() && it->offset < range.offset + range.bytes; ++it) {
    const std::uint64_t from = std::max(range.offset, it->offset);
    const std::uint64_t to = std::min(range.offset + range.bytes, it->offset + it->runs.bytes());
    it->runs.for_each(from - it->offset, to - it->offset,
                      [&](std::uint64_t position, std::uint64_t packed, std::uint64_t bytes) {
                        const std::uint64_t at = it->part.tensor + position;
                        is_inside =
                            is_inside && at >= begin && inside(at - begin, bytes, out.size());
                        if (!is_inside) return;
                        const std::uint64_t in_data = it->offset + packed - range.offset;
                        std::memcpy(out.data() + (at - begin), data.data() + in_data, bytes);
                        copied += bytes;
                      });
  }
  if (is_inside && copied == range.bytes) return {};
  return format_error(Errc::internal, "bytes of a rank have no place in " + name_);
}

// assembly := name:text32 head:text32 bytes:u64 streams:u32 stream*
// stream   := rank:u32 parts:u32 part*
// part     := tensor:u64 item_bytes:u64 dims:u32 sizes:u64* offsets:u64* lengths:u64*
std::string FileAssembly::encode() const {
  std::string out;
  format::put_text32(out, name_);
  format::put_text32(out, head_);
  format::put(out, bytes_, 8);
  format::put(out, streams_.size(), 4);
  for (const Stream& stream : streams_) {
    format::put(out, stream.rank, 4);
    format::put(out, stream.parts.size(), 4);
    for (const auto& [part, runs, offset] : stream.parts) {
      format::put(out, part.tensor, 8);
      format::put(out, part.item_bytes, 8);
      format::put(out, part.sizes.size(), 4);
      put_all(out, part.sizes);
      put_all(out, part.offsets);
      put_all(out, part.lengths);
    }
  }
  return out;
}

Result<FileAssembly> FileAssembly::decode(std::string_view bytes) {
  format::ByteReader reader(std::as_bytes(std::span(bytes)));
  std::string name(reader.text32());
  std::string head(reader.text32());
  FileAssembly assembly(std::move(name), std::move(head), reader.number(8));
  for (std::uint64_t streams = reader.number(4); streams > 0 && !reader.has_failed(); --streams) {
    const std::size_t rank = reader.number(4);
    std::vector<Part> parts;
    for (std::uint64_t left = reader.number(4); left > 0 && !reader.has_failed(); --left) {
      Part& part = parts.emplace_back();
      part.tensor = reader.number(8);
      part.item_bytes = reader.number(8);
      const std::uint64_t dims = reader.number(4);
      read_all(reader, dims, part.sizes);
      read_all(reader, dims, part.offsets);
      read_all(reader, dims, part.lengths);
    }
    if (reader.has_failed()) break;
    TC_TRY(assembly.add_stream(rank, parts));
  }
  if (reader.has_failed() || reader.left() != 0) return damaged();
  return assembly;
}

Result<ObjectFiles> ObjectFiles::of(const SafetensorsLayout& layout,
                                    std::span<const std::vector<OwnedPart>> parts,
                                    bool assembles_all) {
  const std::size_t files = layout.files().size();
  // By file and rank, the parts in the order of the file.
  std::vector<std::vector<std::vector<FileAssembly::Part>>> by_file(
      files, std::vector<std::vector<FileAssembly::Part>>(parts.size()));
  ObjectFiles made;
  made.places.resize(parts.size());
  made.assemblies.resize(parts.size());
  made.sent.resize(parts.size());
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    made.places[rank].are_packed = true;
    for (const OwnedPart& part : parts[rank]) {
      const format::SafeTensor& tensor = layout.tensors()[part.tensor];
      const auto [file, begin] = layout.places()[part.tensor];
      made.places[rank].places.push_back({file, begin});
      by_file[file][rank].push_back(
          {begin, tensor.sizes, part.offsets, part.sizes, tensor.dtype->item_bytes});
    }
  }
  std::vector<std::uint64_t> loads(parts.size());
  for (std::size_t file = 0; file < files; ++file) {
    const auto& [name, header, bytes] = layout.files()[file];
    const auto has_parts = [](const auto& of_rank) { return !of_rank.empty(); };
    const bool has_one_owner =
        !assembles_all && std::ranges::count_if(by_file[file], has_parts) == 1;
    FileAssembly assembly(name, header, bytes);
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      auto& of_file = by_file[file][rank];
      RankPlaces::File& of_rank = made.places[rank].files.emplace_back();
      of_rank.name = name;
      if (!has_parts(of_file)) continue;
      if (has_one_owner) {
        of_rank.bytes = bytes;
        of_rank.head = header;
        continue;
      }
      const auto first_byte = [](const FileAssembly::Part& part) {
        const auto runs = BoxRuns::of(part.sizes, part.offsets, part.lengths, part.item_bytes);
        return part.tensor + (runs ? runs->begin() : 0);
      };
      std::ranges::stable_sort(of_file, {}, first_byte);
      TC_TRY(assembly.add_stream(rank, of_file));
    }
    if (has_one_owner) continue;
    // The rank that writes least, among those that have parts of the file.
    std::size_t writer = assembly.streams() == 0 ? 0 : assembly.rank_of(0);
    for (std::size_t i = 1; i < assembly.streams(); ++i) {
      if (loads[assembly.rank_of(i)] < loads[writer]) writer = assembly.rank_of(i);
    }
    loads[writer] += bytes;
    for (std::size_t i = 0; i < assembly.streams(); ++i) {
      made.sent[assembly.rank_of(i)].push_back({writer, name, assembly.bytes_of(i)});
    }
    made.assemblies[writer].push_back(std::move(assembly));
  }
  return made;
}

}  // namespace torch_ckpt::planning
