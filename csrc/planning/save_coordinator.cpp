#include "planning/save_coordinator.h"

#include <algorithm>
#include <unordered_map>

#include "os/fault.h"
#include "planning/message_bytes.h"
#include "seeded_hash.h"

namespace torch_ckpt::planning {
namespace {

constexpr SeededHash kHash;

Error damaged(std::string_view what) {
  return format_error(Errc::frame_damaged, "the " + std::string(what) + " of a save is damaged");
}

void put_numbers(std::string& bytes, std::span<const std::uint32_t> numbers) {
  put(bytes, std::string_view(reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()));
}

}  // namespace

std::string RankPlan::message(std::optional<std::string_view> parts,
                              std::string_view fingerprints) const {
  std::string bytes;
  put(bytes, parts ? 0 : number_);
  if (parts) put(bytes, *parts);
  put(bytes, fingerprints);
  return bytes;
}

Result<> RankPlan::accept(std::string_view of_template, std::string_view parts,
                          std::string_view reply) {
  MessageReader reader(reply);
  const std::uint64_t number = reader.number();
  const bool is_new = !reader.is_at_end();
  const std::string_view items = is_new ? reader.text() : std::string_view();
  const std::string_view copies = is_new ? reader.text() : std::string_view();
  if (number == 0 || reader.has_failed() || !reader.is_at_end()) return damaged("plan");
  if (is_new) {
    template_ = of_template;
    parts_ = parts;
    items_ = items;
    copies_ = copies;
  }
  number_ = number;
  return {};
}

Result<std::vector<std::string>> SaveCoordinator::assign(std::span<const Message> messages) {
  std::vector<std::optional<std::string_view>> parts(messages.size());
  fingerprints_.assign(messages.size(), {});
  bool has_other_plan = false;
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    MessageReader reader(messages[rank].first);
    const std::uint64_t number = reader.number();
    if (number == 0) {
      parts[rank] = reader.text();
    } else {
      has_other_plan |= number != number_ || planned_->plan.ranks() != messages.size();
    }
    fingerprints_[rank] = reader.text();
    if (reader.has_failed() || !reader.is_at_end()) return damaged("message of a rank");
  }
  std::vector<std::string> replies;
  if (has_other_plan) return replies;
  const bool is_new = std::ranges::any_of(parts, [](const auto& one) { return one.has_value(); });
  if (is_new) {
    TC_FAULT("plan of all ranks", "");
    std::unordered_map<std::string_view, std::shared_ptr<const StateTemplate>> templates;
    std::vector<RankState> states;
    std::vector<std::uint64_t> hashes = hashes_;
    hashes.resize(messages.size());
    for (std::size_t rank = 0; rank < messages.size(); ++rank) {
      if (!parts[rank]) {
        states.push_back(planned_->plan.of_rank(rank));
        continue;
      }
      std::shared_ptr<const StateTemplate>& known = templates[messages[rank].second];
      if (!known) {
        auto made = StateTemplate::decode(messages[rank].second);
        if (!made) return std::move(made).error();
        known = std::make_shared<const StateTemplate>(std::move(*made));
      }
      auto state = RankState::decode(known, *parts[rank]);
      if (!state) return std::move(state).error();
      states.push_back(std::move(*state));
      hashes[rank] = kHash(kHash(messages[rank].second) ^ kHash(*parts[rank]));
    }
    auto plan = GlobalPlan::of(std::move(states));
    if (!plan) return std::move(plan).error();
    planned_ = std::make_unique<Planned>(std::move(*plan));
    hashes_ = std::move(hashes);
    ++number_;
  }
  for (std::size_t rank = 0; rank < messages.size(); ++rank) {
    std::string& reply = replies.emplace_back();
    put(reply, number_);
    if (!is_new) continue;
    put_numbers(reply, plan().owned(rank));
    put_numbers(reply, plan().copies(rank));
  }
  return replies;
}

std::uint64_t SaveCoordinator::plan_hash() const {
  std::uint64_t combined = kHash(hashes_.size());
  for (const std::uint64_t hash : hashes_) combined = kHash(combined ^ hash);
  return combined;
}

std::vector<DifferingReplica> SaveCoordinator::differing_replicas() const {
  return planning::differing_replicas(
      plan(), std::vector<std::string_view>(fingerprints_.begin(), fingerprints_.end()));
}

}  // namespace torch_ckpt::planning
