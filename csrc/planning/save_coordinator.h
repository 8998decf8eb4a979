#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "index/encoded_metadata.h"
#include "index/metadata_encoder.h"
#include "planning/changes.h"
#include "planning/global_plan.h"
#include "planning/plan_metadata.h"
#include "planning/replicas.h"

namespace torch_ckpt::planning {

// The ranks of a group agree on the plan of each save with one message and one reply for each rank.
// Each rank has a RankPlan, and the coordinator also a SaveCoordinator, for all saves of the group.
//
//   1. A rank sends the number of its plan if its state still has the structure from which that plan
//      was made: the template and the parts (planning/state_template.h). Otherwise, it sends its
//      parts. The template is sent separately, because most ranks have the same one. If replicas
//      are compared, fingerprints follow.
//   2. If all ranks have the last plan, the coordinator uses it again, and replies only with its
//      number. Otherwise it makes a new plan, with the next number, and replies with the items of
//      each rank.
//   3. If a rank missed a reply, it has another plan. The coordinator then replies with nothing, and
//      all ranks send their parts in a second round.
//
//   message := number:varint [parts:text if number = 0] fingerprints:text
//   reply   := number:varint [items:text copies:text if the plan is new]

/// A rank's plan: the items that it writes.
class RankPlan {
 public:
  /// Returns true if the plan was made from this structure.
  bool is_of(std::string_view of_template, std::string_view parts) const {
    return number_ != 0 && template_ == of_template && parts_ == parts;
  }
  /// Returns the message of a rank. parts: nothing if the rank's plan is of its structure.
  std::string message(std::optional<std::string_view> parts, std::string_view fingerprints) const;
  /// Keeps a reply. Fails with Errc::frame_damaged if the bytes are not a reply.
  Result<> accept(std::string_view of_template, std::string_view parts, std::string_view reply);

  /// Returns the items that the rank writes; see GlobalPlan::owned().
  std::string_view items() const { return items_; }
  /// Returns the items whose checksums the rank sends; see GlobalPlan::copies().
  std::string_view copies() const { return copies_; }

 private:
  std::uint64_t number_ = 0;
  std::string template_;
  std::string parts_;
  std::string items_;   // encoded as std::uint32_t
  std::string copies_;  // likewise
};

/// The plans of all ranks.
class SaveCoordinator {
 public:
  /// The message of a rank, and its template if the message has parts.
  using Message = std::pair<std::string_view, std::string_view>;

  /// Returns the replies, by rank; nothing if all ranks must send their parts. Fails with
  /// Errc::frame_damaged for bytes that are not a message, and with Errc::unsavable if the
  /// states of ranks contradict each other (global_plan.h).
  Result<std::vector<std::string>> assign(std::span<const Message> messages);

  /// Number of the last plan; 0 if there is none.
  std::uint64_t number() const { return number_; }
  /// Returns a number that is equal for plans of the same states, in this process.
  std::uint64_t plan_hash() const;
  const GlobalPlan& plan() const { return planned_->plan; }
  /// Compares the fingerprints in the last messages.
  std::vector<DifferingReplica> differing_replicas() const;
  /// Encodes the part of the metadata that depends only on the plan.
  void describe() { planned_->metadata.describe(); }
  /// See PlanMetadata::encode().
  Result<index::EncodedMetadata> encode(std::span<const WrittenFiles> written,
                                        const index::MetadataExtras& extras) {
    return planned_->metadata.encode(written, extras);
  }

 private:
  struct Planned {
    explicit Planned(GlobalPlan made) : plan(std::move(made)), metadata(plan) {}

    const GlobalPlan plan;
    PlanMetadata metadata;
  };

  std::uint64_t number_ = 0;
  std::unique_ptr<Planned> planned_;
  std::vector<std::string> fingerprints_;  // by rank
  std::vector<std::uint64_t> hashes_;      // of the structure of each rank's state, by rank
};

}  // namespace torch_ckpt::planning
