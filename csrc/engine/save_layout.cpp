#include "engine/save_layout.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace torch_ckpt::engine {
namespace {

Result<std::vector<planning::NamedBucket>> choose_buckets(const std::vector<SaveItem>& items,
                                                          const NamingOptions& naming) {
  if (naming.file_per_item) {
    const std::string& hint = naming.separation_hint;
    std::vector<planning::NamedBucket> buckets;
    std::vector<planning::NamedBucket> hinted;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const bool is_hinted = !hint.empty() && items[i].name.starts_with(hint);
      (is_hinted ? hinted : buckets).push_back({is_hinted ? hint : "", {i}});
    }
    std::move(hinted.begin(), hinted.end(), std::back_inserter(buckets));
    return buckets;
  }
  std::vector<planning::ItemSize> sizes;
  std::vector<std::string> names;
  sizes.reserve(items.size());
  for (const SaveItem& item : items) {
    sizes.push_back({item.source.bytes, item.tensor != nullptr});
    if (!naming.separation_hint.empty()) names.push_back(item.name);
  }
  return planning::split_with_hint(sizes, names, naming.buckets, naming.separation_hint);
}

}  // namespace

Result<SaveLayout> lay_out_save(std::vector<SaveItem> items, const NamingOptions& naming) {
  auto buckets = choose_buckets(items, naming);
  if (!buckets) return buckets.error();
  SaveLayout layout;
  layout.locations.resize(items.size());
  for (const planning::NamedBucket& bucket : *buckets) {
    if (bucket.items.empty()) continue;
    FileJob job;
    job.items = bucket.items;
    job.image.reserve(bucket.items.size());
    for (const std::size_t index : bucket.items) {
      SaveItem& item = items[index];
      layout.locations[index] = {layout.files.size(), job.image.items().size()};
      if (item.tensor) {
        job.image.add_tensor(*item.tensor, std::move(item.source));
      } else {
        job.image.add_bytes(std::move(item.source));
      }
    }
    layout.file_names.push_back(bucket.prefix + naming.prefix +
                                std::to_string(layout.files.size()) + ".distcp");
    job.name = layout.file_names.back();
    layout.files.push_back(std::move(job));
  }
  return layout;
}

SaveLayout lay_out_parts(std::vector<SavePart> parts, const std::vector<SharedFile>& files) {
  std::vector<std::size_t> order(parts.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto first_byte = [&](std::size_t i) {
    return std::pair(parts[i].file, parts[i].place.tensor + parts[i].place.runs.begin());
  };
  std::ranges::stable_sort(order, {}, first_byte);
  SaveLayout layout;
  layout.locations.resize(parts.size());
  std::size_t file = files.size();  // of the last job
  for (const std::size_t index : order) {
    SavePart& part = parts[index];
    if (part.file != file) {
      file = part.file;
      layout.file_names.push_back(files[file].name);
      layout.files.push_back({files[file].name, {}, {}, files[file]});
      if (files[file].is_packed) layout.files.back().image.pack(files[file].head);
    }
    FileJob& job = layout.files.back();
    layout.locations[index] = {layout.files.size() - 1, job.image.items().size()};
    job.items.push_back(index);
    job.image.add_part(std::move(part.source), std::move(part.place));
  }
  return layout;
}

}  // namespace torch_ckpt::engine
