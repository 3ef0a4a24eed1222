#include "torch/gradient_counter.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/clock.h"

namespace pycoll::torch_adapter {

struct GradientCounter::Hook final : torch::autograd::FunctionPostHook {
  Hook(GradientCounter* counter, int64_t index) : counter(counter), index(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    // A parameter that the graph reaches without a gradient has got none.
    if (!inputs.empty() && inputs[0].defined()) counter->count(index);
    return outputs;
  }

  GradientCounter* const counter;
  const int64_t index;
};

GradientCounter::GradientCounter(std::vector<at::Tensor> parameters, Attention attention)
    : parameters_(std::move(parameters)),
      attention_(std::move(attention)),
      used_(parameters_.size(), 0) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i]);
    const uintptr_t key =
        accumulator->add_post_hook(std::make_unique<Hook>(this, static_cast<int64_t>(i)));
    installed_.push_back({std::move(accumulator), key});
  }
}

GradientCounter::~GradientCounter() { remove(); }

void GradientCounter::remove() {
  for (const Installed& each : installed_) each.accumulator->del_post_hook(each.key);
  installed_.clear();
}

void GradientCounter::plan(Plan plan) {
  plan_ = std::move(plan);
  pending_.assign(static_cast<size_t>(plan_.num_buckets), 0);
  uncopied_.assign(static_cast<size_t>(plan_.num_buckets), 0);
}

int64_t GradientCounter::begin(bool synchronises, bool keeps_order) {
  left_ = plan_.expected;
  std::fill(pending_.begin(), pending_.end(), 0);
  std::fill(uncopied_.begin(), uncopied_.end(), 0);
  for (size_t i = 0; i < left_.size(); ++i) {
    const auto bucket = static_cast<size_t>(plan_.bucket_of[i]);
    if (left_[i] > 0) ++pending_[bucket];
    ++uncopied_[bucket];
  }
  copied_.assign(left_.size(), 0);
  ready_ns_.assign(left_.size(), 0);
  arrivals_.clear();
  keeps_order_ = keeps_order;
  synchronises_ = synchronises;
  active_ = true;
  return ++pass_;
}

bool GradientCounter::end(int64_t pass) {
  if (pass != pass_) return false;
  active_ = false;
  return true;
}

int64_t GradientCounter::pending(int64_t bucket) const {
  return pending_.at(static_cast<size_t>(bucket));
}

int64_t GradientCounter::uncopied(int64_t bucket) const {
  return uncopied_.at(static_cast<size_t>(bucket));
}

void GradientCounter::count(int64_t index) {
  const auto i = static_cast<size_t>(index);
  if (!active_) attention_(Event::kBegin, index);
  used_[i] = 1;
  if (!synchronises_) return;
  ready_ns_[i] = now_ns();
  if (keeps_order_) arrivals_.push_back(index);
  if (--left_[i] > 0) return;
  if (left_[i] < 0) {
    // The bucket may be on its way: what is in it is not touched here.
    uncopy(i);
    attention_(Event::kAgain, index);
    return;
  }
  copy(i);
  if (--pending_[static_cast<size_t>(plan_.bucket_of[i])] == 0) {
    attention_(Event::kComplete, index);
  }
}

void GradientCounter::copy(size_t i) {
  if (!plan_.views[i].has_value()) return;
  at::Tensor view = *plan_.views[i];
  at::Tensor& grad = parameters_[i].mutable_grad();
  if (!grad.defined() || grad.layout() != at::kStrided) return;
  if (!grad.is_same(view)) {
    const at::NoGradGuard no_grad;
    view.copy_(grad);
    // One that has a graph (create_graph=True) stays what it is.
    if (plan_.as_views && !grad.requires_grad()) grad = view;
  }
  copied_[i] = 1;
  --uncopied_[static_cast<size_t>(plan_.bucket_of[i])];
}

void GradientCounter::uncopy(size_t i) {
  if (copied_[i] == 0) return;
  copied_[i] = 0;
  ++uncopied_[static_cast<size_t>(plan_.bucket_of[i])];
}

}  // namespace pycoll::torch_adapter
