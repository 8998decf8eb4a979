#include "planning/plan_metadata.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace torch_ckpt::planning {

PlanMetadata::Described::Described(const GlobalPlan& plan, std::span<const WrittenFiles> written)
    : encoder(draft), locations(plan.ranks()) {
  set_files(written);
  shards = plan.describe(draft);
}

void PlanMetadata::Described::set_files(std::span<const WrittenFiles> written) {
  std::vector<std::pair<std::string_view, std::string_view>> files;
  for (const WrittenFiles& of_rank : written) {
    for (const format::FileResult& file : of_rank) {
      files.emplace_back(file.name, file.checksum_table);
    }
  }
  if (files.size() != draft.files().size()) encoder.forget_locations();
  draft.set_files(files);
}

void PlanMetadata::describe() {
  if (described_) return;
  auto described = std::make_unique<Described>(plan_, std::span<const WrittenFiles>());
  described->encoder.describe();
  described_ = std::move(described);
}

Result<index::EncodedMetadata> PlanMetadata::encode(std::span<const WrittenFiles> written,
                                                    const index::MetadataExtras& extras) {
  // Move the state out of the member, so that an exception discards it instead of leaving it half
  // updated.
  auto described = std::move(described_);
  if (!described) {
    described = std::make_unique<Described>(plan_, written);
  } else {
    described->set_files(written);
  }
  TC_TRY(place(*described, written));
  index::EncodedMetadata encoded = described->encoder.encode(extras);
  described_ = std::move(described);
  return encoded;
}

std::string PlanMetadata::name_of(std::size_t rank, std::size_t number) const {
  return std::string(plan_.name(plan_.entry(rank, number)));
}

bool PlanMetadata::RankLocations::equal(std::uint32_t first, WrittenFiles written) const {
  return first == first_file &&
         std::ranges::equal(files, written, {}, {}, &format::FileResult::locations);
}

Result<> PlanMetadata::place(Described& described, std::span<const WrittenFiles> written) const {
  std::uint32_t first = 0;
  for (std::size_t rank = 0; rank < plan_.ranks(); ++rank) {
    const WrittenFiles of_rank = rank < written.size() ? written[rank] : WrittenFiles();
    RankLocations& known = described.locations[rank];
    if (!known.equal(first, of_rank)) {
      TC_TRY(place(described, rank, first, of_rank));
      known = {first, {}};
      for (const format::FileResult& file : of_rank) known.files.push_back(file.locations);
    }
    first += static_cast<std::uint32_t>(of_rank.size());
  }
  return {};
}

Result<> PlanMetadata::place(Described& described, std::size_t rank, std::uint32_t first,
                             WrittenFiles written) const {
  const std::size_t owned = plan_.owned(rank).size();
  std::vector<bool> is_placed(owned);
  std::size_t placed = 0;
  std::uint32_t number = first;
  for (const format::FileResult& file : written) {
    for (const format::ItemLocation& location : file.locations.decoded()) {
      if (location.item >= owned) {
        return format_error(Errc::metadata_inconsistent,
                            "rank " + std::to_string(rank) + " reported a location for item " +
                                std::to_string(location.item) + ", but has only " +
                                std::to_string(owned) + " items");
      }
      if (is_placed[location.item]) {
        return format_error(Errc::metadata_inconsistent, "rank " + std::to_string(rank) +
                                                             " reported two locations for " +
                                                             name_of(rank, location.item));
      }
      is_placed[location.item] = true;
      const auto shard = described.shards[plan_.part(rank, location.item)];
      if (described.draft.set_location(shard, number, location.offset, location.length)) {
        described.encoder.forget_locations();
      }
      ++placed;
    }
    ++number;
  }
  if (placed == owned) return {};
  const auto missing = std::ranges::find(is_placed, false) - is_placed.begin();
  return format_error(Errc::metadata_inconsistent,
                      "rank " + std::to_string(rank) + " reported the locations of " +
                          std::to_string(placed) + " of its " + std::to_string(owned) +
                          " items; the location of " +
                          name_of(rank, static_cast<std::size_t>(missing)) + " is missing");
}

}  // namespace torch_ckpt::planning
