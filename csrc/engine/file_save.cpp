#include "engine/file_save.h"

#include "format/checksum_table.h"
#include "format/crc32.h"
#include "format/part_sums.h"

namespace torch_ckpt::engine {

Result<format::FileResult> FileSave::result() const try {
  const std::vector<ImageItem>& items = job.image.items();
  format::FileResult result;
  result.name = job.name;
  std::vector<format::ItemLocation> locations;
  locations.reserve(items.size());
  std::vector<format::RecordSums> records;
  records.reserve(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::size_t item = job.items.empty() ? i : job.items[i];
    locations.push_back({item, items[i].offset, items[i].bytes});
    // An empty item has the same offset as the next item, and would hide that item's table entry.
    if (items[i].bytes > 0) records.push_back(stream.sums()[i]);
  }
  result.locations = format::ItemLocations(locations);
  if (job.image.is_of_parts()) {
    const std::vector<format::PartSums> parts = stream.part_sums();
    for (const format::PartSums& part : parts) {
      result.crcs.push_back(format::crc32(0, std::as_bytes(std::span(part.shares))));
    }
    result.checksum_table = format::encode_part_sums(parts);
    return result;
  }
  result.crcs = stream.checksums();
  result.checksum_table = format::encode_checksum_table(records);
  return result;
} catch (...) {
  return exception_error(std::current_exception(), "save");
}

FilePhase FileSave::phase() const {
  // The order of these reads guarantees written <= ready, since bytes are staged before they are
  // written.
  const std::uint64_t written = bytes_written;
  const std::uint64_t ready = bytes_ready;
  if (has_writer && ready > written) return FilePhase::writing;
  if (has_writer && ready == job.image.bytes()) return FilePhase::fsync;
  if (has_stager && ready < job.image.bytes()) return FilePhase::staging;
  return FilePhase::waiting;
}

}  // namespace torch_ckpt::engine
