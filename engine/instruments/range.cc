// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <map>
#include <optional>
#include <string>

#include <ATen/record_function.h>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/engine/instruments/range.h>
#include <weft/profiling/trace/open_ranges.h>
#include <weft/profiling/trace/trace.h>

namespace weft {

namespace {

// Names live as long as the process: tools and the timeline keep pointers to them.
using Names = std::map<std::string, std::optional<trace::Name>, std::less<>>;
Names::value_type& name_of(std::string_view text) {
  static constinit ForkMutex mutex{ForkOrder::Names};
  static auto& names = *new Names();
  const MutexLock lock(mutex);
  auto found = names.find(text);
  if (found == names.end()) {
    found = names.try_emplace(std::string(text)).first;
    found->second.emplace(trace::Layer::User, found->first.c_str());
  }
  return *found;
}

}  // namespace

struct Range::State {
  explicit State(std::string_view name) : State(name, name_of(name)) {}
  State(std::string_view name, Names::value_type& kept)
      : open(kept.first.c_str()), shown(*kept.second) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      profiled.emplace(std::move(*callbacks));
      profiled->before(name);
    }
  }

  const trace::OpenRange open;
  const trace::Range shown;
  std::optional<at::RecordFunction> profiled;  // only while libtorch's profiler runs
};

Range::Range(std::string_view name) : state_(std::make_unique<State>(name)) {}
Range::~Range() = default;

}  // namespace weft
