#include "planning/plan_metadata.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace torch_ckpt::planning {

PlanMetadata::Described::Described(const GlobalPlan& plan, std::span<const WrittenFiles> written,
                                   const index::EntryTable* torch_items)
    : encoder(draft) {
  set_files(written);
  shards = plan.describe(draft, torch_items);
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
  auto described = std::make_unique<Described>(plan_, std::span<const WrittenFiles>(), nullptr);
  described->encoder.describe();
  described_ = std::move(described);
}

Result<index::EncodedMetadata> PlanMetadata::encode(std::span<const WrittenFiles> written,
                                                    const index::EntryTable* torch_items,
                                                    const index::MetadataExtras& extras) {
  // Move the state out of the member, so that an exception discards it instead of leaving it half
  // updated.
  auto described = std::move(described_);
  // Start anew if torch plans items: their locations are copied only when the draft is described.
  if (!described || has_torch_items_ || torch_items != nullptr) {
    described = std::make_unique<Described>(plan_, written, torch_items);
  } else {
    described->set_files(written);
  }
  if (auto placed = place(*described, written); !placed) return std::move(placed).error();
  index::EncodedMetadata encoded = described->encoder.encode(extras);
  described_ = std::move(described);
  has_torch_items_ = torch_items != nullptr;
  return encoded;
}

std::string PlanMetadata::name_of(std::size_t rank, std::size_t number) const {
  return std::string(plan_.name(plan_.entry(rank, number)));
}

Result<> PlanMetadata::place(Described& described, std::span<const WrittenFiles> written) const {
  std::uint32_t number = 0;
  for (std::size_t rank = 0; rank < plan_.ranks(); ++rank) {
    const std::size_t owned = plan_.owned(rank).size();
    std::vector<bool> is_placed(owned);
    std::size_t placed = 0;
    if (rank < written.size()) {
      for (const format::FileResult& file : written[rank]) {
        for (const format::ItemResult& item : file.items) {
          if (item.item >= owned) continue;
          if (is_placed[item.item]) {
            return format_error(Errc::metadata_inconsistent, "rank " + std::to_string(rank) +
                                                                 " reported two locations for " +
                                                                 name_of(rank, item.item));
          }
          is_placed[item.item] = true;
          const auto shard = described.shards[plan_.part(rank, item.item)];
          if (described.draft.set_location(shard, number, item.offset, item.length)) {
            described.encoder.forget_locations();
          }
          ++placed;
        }
        ++number;
      }
    }
    if (placed != owned) {
      const auto missing = std::ranges::find(is_placed, false) - is_placed.begin();
      return format_error(Errc::metadata_inconsistent,
                          "rank " + std::to_string(rank) + " reported the locations of " +
                              std::to_string(placed) + " of its " + std::to_string(owned) +
                              " items; the location of " +
                              name_of(rank, static_cast<std::size_t>(missing)) + " is missing");
    }
  }
  return {};
}

}  // namespace torch_ckpt::planning
