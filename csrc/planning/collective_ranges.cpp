#include "planning/collective_ranges.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace torch_ckpt::planning {
namespace {

// The system calls for a smaller range cost less than the memory for it.
constexpr std::uint64_t kMinRangeBytes = std::uint64_t{1} << 20;

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

struct Cluster {
  CollectiveRanges::Range range;
  std::size_t rank = 0;
  std::size_t machine = kNone;  // kNone: not chosen
  bool has_other_ranks = false;
};

/// Sorts parts by their places. Removes empty parts.
void sort_by_place(std::vector<FilePart>& parts) {
  std::erase_if(parts, [](const FilePart& part) { return part.begin >= part.end; });
  std::ranges::sort(parts, {},
                    [](const FilePart& part) { return std::pair(part.file, part.begin); });
}

}  // namespace

// address := machine process:u64 descriptor:u32 device:u64 number:u64 born_s:u64 born_ns:u32
std::string encode_address(const os::MemoryFile::Address& address) {
  std::string out;
  format::put_text32(out, address.machine);
  format::put(out, static_cast<std::uint64_t>(address.process), 8);
  format::put(out, static_cast<std::uint64_t>(address.descriptor), 4);
  format::put(out, address.file.device, 8);
  format::put(out, address.file.number, 8);
  format::put(out, static_cast<std::uint64_t>(address.file.born_s), 8);
  format::put(out, address.file.born_ns, 4);
  return out;
}

Result<os::MemoryFile::Address> decode_address(std::string_view bytes) {
  format::ByteReader reader(std::as_bytes(std::span(bytes)));
  os::MemoryFile::Address address;
  address.machine = reader.text32();
  address.process = static_cast<std::int64_t>(reader.number(8));
  address.descriptor = static_cast<int>(reader.number(4));
  address.file.device = reader.number(8);
  address.file.number = reader.number(8);
  address.file.born_s = static_cast<std::int64_t>(reader.number(8));
  address.file.born_ns = static_cast<std::uint32_t>(reader.number(4));
  if (reader.has_failed() || reader.left() != 0) {
    return format_error(Errc::frame_damaged, "the address of shared memory is damaged");
  }
  return address;
}

// ranges := address ranges:u32 range*
// range  := file:u32 begin:u64 end:u64
void CollectiveRanges::encode_to(std::string& out) const {
  format::put_text32(out, encode_address(memory));
  format::put(out, ranges.size(), 4);
  for (const Range& range : ranges) {
    format::put(out, range.file, 4);
    format::put(out, range.begin, 8);
    format::put(out, range.end, 8);
  }
}

Result<CollectiveRanges> CollectiveRanges::decode_from(format::ByteReader& reader) {
  CollectiveRanges decoded;
  auto memory = decode_address(reader.text32());
  if (!memory) return memory.error();
  decoded.memory = std::move(*memory);
  bool is_ordered = true;
  for (std::uint64_t left = reader.number(4); left > 0 && !reader.has_failed(); --left) {
    Range range;
    range.file = static_cast<std::uint32_t>(reader.number(4));
    range.begin = reader.number(8);
    range.end = reader.number(8);
    if (!decoded.ranges.empty()) {
      const Range& last = decoded.ranges.back();
      is_ordered =
          is_ordered && std::pair(last.file, last.end) <= std::pair(range.file, range.begin);
    }
    is_ordered = is_ordered && range.begin < range.end;
    decoded.ranges.push_back(range);
  }
  if (!is_ordered || reader.has_failed()) {
    return format_error(Errc::frame_damaged, "the ranges of a collective write are damaged");
  }
  return decoded;
}

std::vector<std::shared_ptr<const CollectiveRanges>> choose_collective_ranges(
    std::vector<FilePart> parts, std::span<const std::optional<os::MemoryFile::Address>> offers) {
  std::map<std::string_view, std::size_t> machines;
  std::vector<std::shared_ptr<CollectiveRanges>> of_machine;
  std::vector<std::size_t> machine_of(offers.size(), kNone);  // by rank
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    if (!offers[rank]) continue;
    const auto [machine, is_new] = machines.emplace(offers[rank]->machine, of_machine.size());
    if (is_new) {
      of_machine.push_back(std::make_shared<CollectiveRanges>());
      of_machine.back()->memory = *offers[rank];
    }
    machine_of[rank] = machine->second;
  }

  const auto choose = [&](const Cluster& cluster) {
    if (cluster.machine == kNone || !cluster.has_other_ranks) return;
    auto& ranges = of_machine[cluster.machine]->ranges;
    const auto& [file, begin, end] = cluster.range;
    if (!ranges.empty() && ranges.back().file == file && ranges.back().end == begin) {
      ranges.back().end = end;
    } else {
      ranges.push_back(cluster.range);
    }
  };
  sort_by_place(parts);
  Cluster cluster;
  for (const FilePart& part : parts) {
    const bool is_long = part.run_bytes >= kLongRunBytes;
    const std::size_t machine = is_long ? kNone : machine_of.at(part.rank);
    auto& [file, begin, end] = cluster.range;
    if (part.file == file && part.begin < end) {
      end = std::max(end, part.end);
      if (machine != cluster.machine) cluster.machine = kNone;
      cluster.has_other_ranks = cluster.has_other_ranks || part.rank != cluster.rank;
    } else {
      choose(cluster);
      cluster = {{part.file, part.begin, part.end}, part.rank, machine, false};
    }
  }
  choose(cluster);

  for (const auto& machine : of_machine) {
    std::erase_if(machine->ranges, [](const CollectiveRanges::Range& range) {
      return range.end - range.begin < kMinRangeBytes;
    });
  }
  std::vector<std::shared_ptr<const CollectiveRanges>> of_rank(offers.size());
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    if (machine_of[rank] == kNone) continue;
    const auto& ranges = of_machine[machine_of[rank]];
    if (!ranges->ranges.empty()) of_rank[rank] = ranges;
  }
  return of_rank;
}

bool are_interleaved(std::vector<FilePart> parts, std::span<const std::string> hosts) {
  sort_by_place(parts);
  // The parts whose ranges overlap.
  CollectiveRanges::Range range;
  std::size_t first = 0;
  bool has_short_runs = false;
  bool has_other_hosts = false;
  for (const FilePart& part : parts) {
    if (part.file != range.file || part.begin >= range.end) {
      range = {part.file, part.begin, part.end};
      first = part.rank;
      has_short_runs = has_other_hosts = false;
    }
    range.end = std::max(range.end, part.end);
    has_short_runs = has_short_runs || part.run_bytes < kLongRunBytes;
    has_other_hosts = has_other_hosts || hosts[part.rank] != hosts[first];
    if (has_short_runs && has_other_hosts) return true;
  }
  return false;
}

bool are_shared(std::span<const FilePart> parts, std::span<const std::string> hosts) {
  std::unordered_map<std::uint32_t, std::size_t> rank_of;  // by file
  return std::ranges::any_of(parts, [&](const FilePart& part) {
    return hosts[rank_of.try_emplace(part.file, part.rank).first->second] != hosts[part.rank];
  });
}

}  // namespace torch_ckpt::planning
