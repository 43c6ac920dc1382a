// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <type_traits>
#include <utility>

#include <unistd.h>

#include <weft/python/backend/completions.h>
#include <weft/python/backend/errors.h>
#include <weft/python/backend/group_backend.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

namespace {

// Releases of libtorch that cannot reconfigure a group have constant members.
template <class Number>
void assign(Number& number, int value) {
  if constexpr (!std::is_const_v<Number>) number = value;
}

// The backends of this process that have not left.
struct Present {
  std::mutex mutex;
  std::set<GroupBackend*> backends;
  ::pid_t process = ::getpid();
  bool is_over = false;  // the interpreter ends
};

Present& present() {
  static auto* const all = new Present;  // outlives the interpreter
  return *all;
}

// Keeps the groups for ever, so that no destructor waits for other ranks.
void keep(std::vector<weft::ProcessGroup> groups) {
  static auto* const kept = new std::vector<weft::ProcessGroup>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  kept->insert(kept->end(), groups.begin(), groups.end());
}

// How long the end of the interpreter waits for callbacks of futures: after all operations have
// ended, or while other ranks wait for the news that this rank is lost.
constexpr std::chrono::milliseconds kPatience(10000), kHaste(200);

constexpr CallName kCoalesced{c10d::OpType::COALESCED, "coalesced operations", "weft:coalesced"};

}  // namespace

GroupBackend::GroupBackend(weft::ProcessGroup group, c10::intrusive_ptr<c10d::Store> store,
                           Place place)
    : c10d::Backend(place.rank, place.size),
      groups_(std::move(group)),
      store_(std::move(store)),
      place_(std::move(place)),
      timeout_(place_.timeout) {
  init();
  Present& all = present();
  const std::lock_guard lock(all.mutex);
  if (all.process != ::getpid()) {
    all.process = ::getpid();
    all.backends.clear();
  }
  all.backends.insert(this);
}

GroupBackend::~GroupBackend() {
  Present& all = present();
  bool is_over = false;
  {
    const std::lock_guard lock(all.mutex);
    all.backends.erase(this);
    is_over = all.is_over;
  }
  std::vector<weft::ProcessGroup> left = groups_.take();
  if (is_over) {
    keep(std::move(left));
    return;
  }
  // Dropping the last handle waits until the others have what they need of this rank.
  const WithoutGil unlocked;
  while (!left.empty()) left.pop_back();
}

c10::intrusive_ptr<c10d::Backend::Options> GroupBackend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("weft", timeout_.load());
  options->group_name = place_.name;
  const auto ranks = group().ranks();
  options->global_ranks_in_group.assign(ranks.begin(), ranks.end());
  return options;
}

void GroupBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (timeout > place_.timeout) {
    TORCH_WARN("weft: the timeout of group '", place_.name, "' cannot be raised to ",
               timeout.count(), " ms, above the ", place_.timeout.count(),
               " ms that it was made with, and stays at those; give the longest that you need to "
               "init_process_group or new_group");
  }
  timeout_ = std::min(timeout, place_.timeout);
}

c10d::ErrorType GroupBackend::getError() {
  if (is_aborted_) return c10d::ErrorType::SUCCESS;  // as Gloo: the program has asked for it
  for (const weft::ProcessGroup& one : groups_.all()) {
    const auto error = one.error();
    if (!error) continue;
    switch (error->blame()) {
      case Blame::Timeout: return c10d::ErrorType::TIMEOUT;
      case Blame::PeerLost: return c10d::ErrorType::REMOTE_ERROR;
      default: return c10d::ErrorType::COMM_ERROR;
    }
  }
  return c10d::ErrorType::SUCCESS;
}

void GroupBackend::abort() {
  const WithoutGil unlocked;
  is_aborted_ = true;
  translated("abort", [&] {
    for (weft::ProcessGroup& one : groups_.all()) one.abort("its program called abort()");
  });
}

void GroupBackend::shutdown() { leave(place_.timeout); }

void GroupBackend::leave(std::chrono::milliseconds limit) {
  std::vector<weft::ProcessGroup> left = taken_groups();
  Present& all = present();
  {
    const std::lock_guard lock(all.mutex);
    all.backends.erase(this);
  }
  if (left.empty()) return;
  interruptible([left = std::move(left), limit, name = place_.name]() mutable {
    // The CUDA group was made of the other one, which goes last.
    for (; !left.empty(); left.pop_back()) {
      try {
        left.back().leave(limit);
      } catch (const Error& error) {
        if (error.blame() == Blame::Timeout) TORCH_WARN("weft: group '", name, "': ", error.text());
      }
    }
  });
}

void GroupBackend::leave_all(bool politely) {
  Present& all = present();
  for (;;) {
    GroupBackend* next = nullptr;
    {
      const std::lock_guard lock(all.mutex);
      if (all.process != ::getpid()) return;  // they are the parent's
      if (!politely) all.is_over = true;
      if (!politely || all.backends.empty()) break;
      next = *all.backends.begin();
    }
    next->leave(next->place().timeout);
  }
  interruptible([limit = politely ? kPatience : kHaste] { await_completions(limit); });
  hold_waits();  // only now: callbacks of futures may wait
  let_waits_return();
}

void GroupBackend::leave_by_exception() {
  // Weft tells the others of it where a group is left while an exception unwinds the stack.
  struct LeavesUnwound {
    weft::ProcessGroup& group;
    ~LeavesUnwound() {
      try {
        group.leave(kHaste);
      } catch (const Error&) {  // it has left before
      }
    }
  };
  Present& all = present();
  const std::lock_guard lock(all.mutex);
  if (all.process != ::getpid()) return;  // they are the parent's
  for (GroupBackend* const backend : all.backends) {
    for (weft::ProcessGroup& group : backend->groups_.all()) {
      try {
        const LeavesUnwound leaving{group};
        throw std::exception();
      } catch (const std::exception&) {
      }
    }
  }
}

void GroupBackend::replace(weft::ProcessGroup group, const Place& place) {
  groups_.replace(std::move(group));
  place_ = place;
  assign(rank_, place.rank);
  assign(size_, place.size);
  is_aborted_ = false;
  coalescing_.end();
}

weft::ProcessGroup GroupBackend::group() const {
  weft::ProcessGroup group = groups_.first();
  if (group) return group;
  throw Failure(Error(Blame::Caller, "the process group '" + place_.name +
                                         "' has been shut down, or waits for its first "
                                         "_reconfigure; make a new one to go on"),
                "");
}

std::chrono::milliseconds GroupBackend::limit_of(std::chrono::milliseconds timeout) const {
  return timeout > std::chrono::milliseconds(0) ? std::min(timeout, place_.timeout)
                                                : timeout_.load();
}

std::vector<weft::ProcessGroup> GroupBackend::limited_groups(
    std::chrono::milliseconds timeout) const {
  std::vector<weft::ProcessGroup> all = groups_.all();
  const auto limit = limit_of(timeout);
  for (weft::ProcessGroup& one : all) {
    if (limit < place_.timeout) one = one.with_timeout(limit);
  }
  return all;
}

c10::intrusive_ptr<c10d::Work> GroupBackend::issue(
    Call call, const std::function<Works(weft::ProcessGroup&, Outputs&)>& function) {
  const WithoutGil unlocked;
  const auto limit = limit_of(call.timeout);
  const Cause operation{this, ++number_};
  auto work = c10::make_intrusive<IssuedWork>(getRank(), call.name, operation, limit, call.inputs,
                                              call.outputs);
  Outputs outputs(call.name.operation);
  try {
    translated(call.name.operation, [&] {
      order_.next(call.name, operation);
      weft::ProcessGroup group = groups_.on(call.device, place_.timeout);
      if (!group) group = this->group();  // throws: it has been shut down
      if (limit < place_.timeout) group = group.with_timeout(limit);
      auto works = function(group, outputs);
      Copies copies;
      if (!outputs.is_direct()) copies.push_back(std::make_shared<CopyBack>(std::move(outputs)));
      work->issued(std::move(works), std::move(copies));
    });
  } catch (const std::exception&) {
    coalescing_.end();  // an exception leaves c10d's coalescing without its end
    throw;
  }
  // The stream waits, and copies the outputs back after the operation.
  if (!work->copies().empty() && call.device.is_cuda()) work->wait(::kNoTimeout);
  coalescing_.add(*work, call.outputs);
  return work;
}

c10::intrusive_ptr<c10d::Work> GroupBackend::endCoalescing() {
  auto all = coalescing_.end();
  TORCH_CHECK(all.has_value(), "weft: coalescing ends, but it has not begun");
  auto work = c10::make_intrusive<IssuedWork>(getRank(), kCoalesced, Cause{this, number_.load()},
                                              timeout_.load(), std::vector<at::Tensor>(),
                                              std::move(all->outputs));
  work->issued(std::move(all->operations), std::move(all->copies));
  return work;
}

}  // namespace weft::python
