#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "planning/box_runs.h"
#include "planning/safetensors_layout.h"

namespace torch_ckpt::planning {

// The assembly of a file from the parts of several ranks. Each of these ranks sends its parts of
// the file as one stream, packed in the order of the file.
class FileAssembly {
 public:
  /// A part of a tensor in a stream.
  struct Part {
    std::uint64_t tensor = 0;  // offset of the tensor's data in the file
    std::vector<std::uint64_t> sizes;
    std::vector<std::uint64_t> offsets;
    std::vector<std::uint64_t> lengths;
    std::uint64_t item_bytes = 1;
  };
  /// Bytes of a stream.
  struct Range {
    std::size_t stream = 0;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;

    bool operator==(const Range&) const = default;
  };

  FileAssembly(std::string name, std::string head, std::uint64_t bytes)
      : name_(std::move(name)), head_(std::move(head)), bytes_(bytes) {}

  /// Adds the stream of a rank with these parts, in the order of their first bytes in the file.
  /// Fails with Errc::frame_damaged if a part does not lie within its tensor, or the tensor within
  /// the file.
  Result<> add_stream(std::size_t rank, std::span<const Part> parts);

  const std::string& name() const { return name_; }
  std::uint64_t bytes() const { return bytes_; }
  std::size_t streams() const { return streams_.size(); }
  std::size_t rank_of(std::size_t stream) const { return streams_.at(stream).rank; }
  /// Returns the size of a stream.
  std::uint64_t bytes_of(std::size_t stream) const;

  /// Returns the bytes of streams that the bytes [begin, end) of the file consist of, behind the
  /// head. Without gaps, a stream has one range.
  std::vector<Range> ranges(std::uint64_t begin, std::uint64_t end) const;
  /// Copies the bytes of the head to `out`, which has the file's bytes from `begin` on.
  void copy_head(std::uint64_t begin, std::span<std::byte> out) const;
  /// Copies bytes of a stream, from `offset` on, to their places in `out`, which has the file's
  /// bytes from `begin` on. Fails with Errc::internal if a place is outside of `out`.
  Result<> copy(const Range& range, std::span<const std::byte> data, std::uint64_t begin,
                std::span<std::byte> out) const;

  std::string encode() const;
  /// Fails with Errc::frame_damaged.
  static Result<FileAssembly> decode(std::string_view bytes);

 private:
  struct Placed {
    Part part;
    BoxRuns runs;
    std::uint64_t offset = 0;  // in the stream
  };
  struct Stream {
    std::size_t rank = 0;
    std::vector<Placed> parts;
  };

  std::string name_;
  std::string head_;
  std::uint64_t bytes_;
  std::vector<Stream> streams_;
};

// Decides which rank writes each file of a layout, so that one rank writes a file in order:
//
//   1. If one rank has all parts of a file, that rank writes the file, unless all files are assembled.
//   2. Otherwise, each rank that has parts of the file sends them to one of these ranks, which
//      assembles the file. The files are distributed over the ranks by their sizes.
//
// Each rank sends, and assembles, its files in the order of the layout.
struct ObjectFiles {
  /// A stream that a rank sends.
  struct Sent {
    std::size_t to = 0;  // the rank that assembles the file
    std::string file;    // its name
    std::uint64_t bytes = 0;
  };
  std::vector<RankPlaces> places;                     // by rank
  std::vector<std::vector<FileAssembly>> assemblies;  // by rank
  std::vector<std::vector<Sent>> sent;                // by rank

  /// parts: of each rank, as in RankPlaces::of().
  static Result<ObjectFiles> of(const SafetensorsLayout& layout,
                                std::span<const std::vector<OwnedPart>> parts, bool assembles_all);
};

}  // namespace torch_ckpt::planning
