// Which gradients of a backward pass are there, counted and copied into buckets where autograd makes them: thousands of small
// parameters would otherwise cost a call into Python each, and large gradients have left the caches later.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace pycoll::torch_adapter {

// The rules are the caller's; here is only what happens for every parameter in every pass. `attention(index)` is called on
// autograd's thread, without a lock held, when parameter `index` has got a gradient and
//  - no pass is under way, after which one has to be: the gradient is counted when the call returns;
//  - its bucket has become complete; or
//  - it had all that it was to get.
class GradientCounter {
 public:
  enum class Event { kBegin, kComplete, kAgain };
  using Attention = std::function<void(Event event, int64_t index)>;

  GradientCounter(std::vector<at::Tensor> parameters, Attention attention);
  ~GradientCounter();
  GradientCounter(const GradientCounter&) = delete;
  GradientCounter& operator=(const GradientCounter&) = delete;

  // Takes the hooks off the parameters. Idempotent.
  void remove();

  // For the passes to come. `expected`: gradients that each parameter gets in a pass; `bucket_of`: its bucket. A bucket is
  // complete when all its parameters that expect something have got it.
  // `views`: where in its bucket a parameter's gradient goes once all that is expected has come; nothing for those that
  // the caller deals with. `as_views`: make the view the parameter's gradient.
  struct Plan {
    std::vector<int64_t> expected;
    std::vector<int64_t> bucket_of;
    int64_t num_buckets = 0;
    std::vector<std::optional<at::Tensor>> views;
    bool as_views = false;
  };
  void plan(Plan plan);
  // A pass begins. One that does not synchronise counts only that parameters are used. `keeps_order`: remember in which
  // order gradients come. Returns the pass's number, for end().
  int64_t begin(bool synchronises, bool keeps_order);
  void set_synchronises(bool synchronises) { synchronises_ = synchronises; }
  // Ends that pass, unless another has begun since; says whether it has.
  bool end(int64_t pass);
  bool active() const { return active_; }

  // Parameters of a bucket that still wait for something.
  int64_t pending(int64_t bucket) const;
  // Parameters of a bucket whose gradient has not been copied in this pass; and which have been.
  int64_t uncopied(int64_t bucket) const;
  const std::vector<uint8_t>& copied() const { return copied_; }
  const std::vector<int64_t>& left() const { return left_; }
  const std::vector<int64_t>& arrivals() const { return arrivals_; }
  // Of the monotonic clock; 0: no gradient in this pass.
  const std::vector<int64_t>& ready_ns() const { return ready_ns_; }
  // Not 0: used since this was set. Lives through passes.
  const std::vector<uint8_t>& used() const { return used_; }
  void set_used(std::vector<uint8_t> used) { used_ = std::move(used); }

 private:
  struct Hook;
  void count(int64_t index);
  void copy(size_t i);
  void uncopy(size_t i);

  const std::vector<at::Tensor> parameters_;
  const Attention attention_;
  // Shared or intrusive, as the version of torch has it.
  using Accumulator =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Installed {
    Accumulator accumulator;  // autograd itself holds it weakly
    uintptr_t key;
  };
  std::vector<Installed> installed_;

  Plan plan_;
  int64_t pass_ = 0;
  bool active_ = false;
  bool synchronises_ = false;
  bool keeps_order_ = false;
  std::vector<uint8_t> used_;
  std::vector<int64_t> left_;
  std::vector<int64_t> pending_;   // a bucket each
  std::vector<int64_t> uncopied_;  // a bucket each
  std::vector<uint8_t> copied_;
  std::vector<int64_t> ready_ns_;
  std::vector<int64_t> arrivals_;
};

}  // namespace pycoll::torch_adapter
