// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/graph_task.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/ddp/other_wrappers.h>

namespace weft::parallel {

namespace {

struct Wrappers {
  Mutex mutex;
  std::vector<const OtherWrappers*> all WEFT_GUARDED_BY(mutex);
};

Wrappers& wrappers() {
  static Wrappers* const made = new Wrappers();  // never destroyed: threads may outlive main()
  return *made;
}

}  // namespace

OtherWrappers::OtherWrappers(const TrainedParameters& parameters) : parameters_(parameters) {
  MutexLock lock(wrappers().mutex);
  wrappers().all.push_back(this);
}

OtherWrappers::~OtherWrappers() {
  MutexLock lock(wrappers().mutex);
  std::erase(wrappers().all, this);
}

void OtherWrappers::note_averaged() {
  averaged_task_ = torch::autograd::get_current_graph_task_id();
}

// The hooks of one accumulator run one after the other on one thread, so `last` sees both.
void OtherWrappers::require_alone(std::size_t parameter, const void* context_pass) const {
  struct Last {
    int graph_task = -1;
    const void* context_pass = nullptr;
    const void* parameter = nullptr;
    const OtherWrappers* by = nullptr;
  };
  thread_local Last last;
  const Last now{torch::autograd::get_current_graph_task_id(), context_pass,
                 parameters_[parameter].tensor.unsafeGetTensorImpl(), this};
  const Last before = std::exchange(last, now);
  if (before.by == this || before.parameter != now.parameter ||
      before.graph_task != now.graph_task || before.context_pass != now.context_pass)
    return;
  throw Error(Blame::Caller,
              "two DistributedDataParallel of one module take part in one backward, and both would "
              "average " +
                  parameters_.names_of({parameter}) + "; use one of them for the whole loss");
}

bool OtherWrappers::average(std::size_t parameter, int graph_task) const {
  if (graph_task < 0) return false;
  const at::Tensor& tensor = parameters_[parameter].tensor;
  MutexLock lock(wrappers().mutex);
  return std::any_of(wrappers().all.begin(), wrappers().all.end(), [&](const auto* other) {
    return other != this && other->averaged_task_ == graph_task &&
           other->parameters_.contain(tensor);
  });
}

}  // namespace weft::parallel
