// SPDX-License-Identifier: Apache-2.0
#include <set>

#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/tests/harness/fake_driver.h>
#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

namespace {

std::atomic<FakeState*> active{nullptr};

// The table's entry for one function of FakeState.
template <auto Method, Function Which>
struct Entry;
template <class... Arguments, CUresult (FakeState::*Method)(Arguments...), Function Which>
struct Entry<Method, Which> {
  static CUresult CUDAAPI call(Arguments... arguments) {
    FakeState* const state = active.load();
    if (state == nullptr) return CUDA_ERROR_DEINITIALIZED;
    std::lock_guard lock(state->mutex);
    const CUresult refused = state->enter(Which);
    return refused == CUDA_SUCCESS ? (state->*Method)(arguments...) : refused;
  }
};

cuda::Driver make_table() {
  cuda::Driver table;
#define WEFT_FAKE_ENTRY(member, symbol) \
  table.member = &Entry<&FakeState::member, Function::member>::call;
  WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_FAKE_ENTRY)
#undef WEFT_FAKE_ENTRY
  return table;
}

static_assert(sizeof(cuda::Driver) == kFunctions * sizeof(void*),
              "FakeDriver::index_of counts pointers");

// Returns the stream that the view names, whatever context is current. Requires FakeState::mutex.
FakeStream& stream_of(FakeState& state, const cuda::StreamRef& view) {
  FakeContext* const context = state.primary.at(static_cast<std::size_t>(view.device().index()));
  if (context != nullptr && view.native() == nullptr) return *state.legacy_streams.at(context);
  FakeStream* const stream = object_of(state.streams, view.native());
  if (stream == nullptr) throw Error(Blame::Caller, "the fake driver has no such stream");
  return *stream;
}

}  // namespace

const char* name(Function function) {
  // The names lack the versions that cuda.h's macros add, because the operand of # is not expanded.
#define WEFT_FAKE_NAME(member, symbol) #symbol,
  static constexpr const char* kNames[] = {WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_FAKE_NAME)};
#undef WEFT_FAKE_NAME
  return kNames[static_cast<std::size_t>(function)];
}

FakeDriver::FakeDriver(Options options)
    : state_(std::make_unique<FakeState>(options)),
      table_(std::make_shared<const cuda::Driver>(make_table())) {
  FakeState* none = nullptr;
  if (!active.compare_exchange_strong(none, state_.get())) {
    throw Error(Blame::Caller,
                "a FakeDriver is active already; the driver's functions cannot tell two apart");
  }
}

FakeDriver::~FakeDriver() {
  {
    std::lock_guard lock(state_->mutex);
    state_->complain_of_hung(nullptr);
  }
  active = nullptr;
  for (const std::string& complaint : take_complaints())
    ADD_FAILURE() << "fake CUDA driver: " << complaint;
}

std::shared_ptr<const cuda::Driver> FakeDriver::driver() const { return table_; }

bool FakeDriver::step(const cuda::StreamRef& stream) {
  std::unique_lock lock(state_->mutex);
  return state_->step(stream_of(*state_, stream), lock);
}

std::size_t FakeDriver::run(const cuda::StreamRef& stream) {
  std::size_t steps = 0;
  while (step(stream)) ++steps;
  return steps;
}

std::size_t FakeDriver::run() {
  std::unique_lock lock(state_->mutex);
  return state_->run_all(lock);
}

std::size_t FakeDriver::pending(const cuda::StreamRef& stream) const {
  std::lock_guard lock(state_->mutex);
  const FakeStream& found = stream_of(*state_, stream);
  return static_cast<std::size_t>(found.enqueued - found.finished);
}

std::size_t FakeDriver::pending() const {
  std::lock_guard lock(state_->mutex);
  std::size_t count = 0;
  for (const auto& stream : state_->streams)
    count += static_cast<std::size_t>(stream->enqueued - stream->finished);
  return count;
}

void FakeDriver::hold(const cuda::StreamRef& stream) {
  std::lock_guard lock(state_->mutex);
  stream_of(*state_, stream).held = true;
}

void FakeDriver::release(const cuda::StreamRef& stream) {
  std::lock_guard lock(state_->mutex);
  stream_of(*state_, stream).held = false;
  state_->changed.notify_all();
}

void FakeDriver::hold_function(std::size_t index, bool held) {
  std::lock_guard lock(state_->mutex);
  state_->held[index] = held;
  state_->changed.notify_all();
}

void FakeDriver::delay_function(std::size_t index, std::chrono::milliseconds time) {
  std::lock_guard lock(state_->mutex);
  state_->delays[index] = time;
}

void FakeDriver::fail_function(std::size_t index, CUresult result, int nth) {
  std::lock_guard lock(state_->mutex);
  state_->failures.push_back({static_cast<Function>(index), result, nth});
}

void FakeDriver::lose_context(int device, CUresult result) {
  std::lock_guard lock(state_->mutex);
  FakeContext* const context = state_->primary.at(static_cast<std::size_t>(device));
  if (context == nullptr)
    throw Error(Blame::Caller, "cuda:" + std::to_string(device) + " has no context to lose");
  state_->lose(*context, result);
}

CUresult FakeDriver::enqueue(CUstream stream, const std::string& text, std::function<void()> run,
                             std::function<bool()> ready) {
  std::lock_guard lock(state_->mutex);
  const auto body = [run = std::move(run)] {
    run();
    return CUDA_SUCCESS;
  };
  FakeStream* const found = object_of(state_->streams, stream);
  if (found == nullptr || found->destroyed)
    return state_->refuse(CUDA_ERROR_INVALID_HANDLE, text + " on an unknown stream");
  if (found->context->lost != CUDA_SUCCESS) return found->context->lost;
  return state_->enqueue(*found, {Function::launch_kernel, text, body, std::move(ready)});
}

CUresult FakeDriver::begin_capture(const cuda::StreamRef& stream, CUstreamCaptureMode mode) {
  std::lock_guard lock(state_->mutex);
  return state_->begin_capture(stream_of(*state_, stream), mode);
}

CUresult FakeDriver::end_capture(const cuda::StreamRef& stream, Graph& graph) {
  std::lock_guard lock(state_->mutex);
  return state_->end_capture(stream_of(*state_, stream), graph);
}

CUresult FakeDriver::launch(const Graph& graph, const cuda::StreamRef& stream) {
  std::lock_guard lock(state_->mutex);
  return state_->launch(*graph, stream_of(*state_, stream));
}

void FakeDriver::define_kernel(const std::string& kernel, std::vector<std::size_t> parameter_sizes,
                               std::function<void(const Launch&)> body) {
  std::lock_guard lock(state_->mutex);
  state_->definitions[kernel] = {kernel, std::move(parameter_sizes), std::move(body)};
}

int FakeDriver::calls_of(std::size_t index) const {
  std::lock_guard lock(state_->mutex);
  return state_->calls[index];
}

int FakeDriver::host_blocks() const {
  std::lock_guard lock(state_->mutex);
  return state_->host_blocks;
}

std::byte* FakeDriver::behind(const void* address) const {
  std::lock_guard lock(state_->mutex);
  return state_->behind(reinterpret_cast<CUdeviceptr>(address));
}

std::vector<std::string> FakeDriver::enqueued() const {
  std::lock_guard lock(state_->mutex);
  return state_->enqueued;
}

std::vector<std::string> FakeDriver::executed() const {
  std::lock_guard lock(state_->mutex);
  std::vector<std::string> texts;
  for (const auto& [stream, text] : state_->executed) texts.push_back(text);
  return texts;
}

std::vector<std::string> FakeDriver::executed(const cuda::StreamRef& stream) const {
  std::lock_guard lock(state_->mutex);
  const FakeStream* const wanted = &stream_of(*state_, stream);
  std::vector<std::string> texts;
  for (const auto& [ran_on, text] : state_->executed) {
    if (ran_on == wanted) texts.push_back(text);
  }
  return texts;
}

void FakeDriver::forget() {
  std::lock_guard lock(state_->mutex);
  std::exchange(state_->enqueued, {});
  std::exchange(state_->executed, {});
}

FakeDriver::Alive FakeDriver::alive() const {
  std::lock_guard lock(state_->mutex);
  const auto is_alive = [](const auto& object) {
    return !object->destroyed && !object->context->destroyed;
  };
  Alive alive;
  for (const auto& stream : state_->streams) alive.streams += is_alive(stream);
  alive.streams -= state_->legacy_streams.size();
  for (const auto& event : state_->events) alive.events += is_alive(event);
  for (const auto& [base, allocation] : state_->allocations) {
    if (allocation.state == Allocation::State::Freed) continue;
    ++(allocation.mapped != 0                        ? alive.mappings
       : allocation.kind == Allocation::Kind::Device ? alive.device_allocations
                                                     : alive.pinned_allocations);
  }
  std::set<const FakePhysical*> held;
  for (const FakeHandle& handle : state_->handles) {
    if (handle.memory != nullptr) held.insert(handle.memory);
  }
  alive.physical_memories = held.size();
  for (const auto& [base, reservation] : state_->reservations)
    alive.reservations += !reservation.freed;
  for (const auto& pool : state_->pools) alive.pools += !pool->destroyed;
  for (const auto& library : state_->libraries) alive.libraries += !library->unloaded;
  for (const FakeContext* context : state_->primary) alive.contexts += context != nullptr;
  return alive;
}

std::vector<std::string> FakeDriver::take_complaints() {
  std::lock_guard lock(state_->mutex);
  return std::exchange(state_->complaints, {});
}

}  // namespace weft::harness
