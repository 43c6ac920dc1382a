// SPDX-License-Identifier: Apache-2.0
#include <weft/profiling/trace/trace.h>

#if WEFT_TRACE_ENABLED

#include <weft/profiling/trace/nvtx.h>
#include <weft/profiling/trace/timeline.h>

namespace weft::trace {

inline namespace enabled {

namespace {

timeline::Label label(const Name& name, const Payload* payload) {
  if (payload == nullptr) return {name.text(), name.layer(), 0, -1};
  return {name.text(), name.layer(), payload->bytes, payload->rank};
}

void begin(Name& name, const Payload* payload) {
  nvtx::push(name, payload);
  if (timeline::on()) timeline::push(label(name, payload));
}

void point(Name& name, const Payload* payload) {
  nvtx::mark(name, payload);
  if (timeline::on()) timeline::mark(label(name, payload));
}

}  // namespace

Range::Range(Name& name) noexcept : layer_(name.layer()) { begin(name, nullptr); }

Range::Range(Name& name, const Payload& payload) noexcept : layer_(name.layer()) {
  begin(name, &payload);
}

Range::~Range() {
  nvtx::pop(layer_);
  if (timeline::on()) timeline::pop();
}

void mark(Name& name) noexcept { point(name, nullptr); }

void mark(Name& name, const Payload& payload) noexcept { point(name, &payload); }

Arrow Arrow::leave() noexcept {
  Arrow made;
  if (!timeline::on()) return made;
  made.id_ = timeline::next_arrow();
  timeline::leave(made.id_);
  return made;
}

void Arrow::arrive() const noexcept {
  if (id_ != 0 && timeline::on()) timeline::arrive(id_);
}

}  // namespace enabled

}  // namespace weft::trace

#endif
