#pragma once

#include <utility>

#include "planning/global_plan.h"
#include "planning/plan_metadata.h"

namespace torch_ckpt::python {

/// A plan and the encoder of its metadata, which can encode only one save at a time.
struct PlanWithMetadata {
  explicit PlanWithMetadata(planning::GlobalPlan made) : plan(std::move(made)), metadata(plan) {}

  const planning::GlobalPlan plan;
  planning::PlanMetadata metadata;
};

}  // namespace torch_ckpt::python
