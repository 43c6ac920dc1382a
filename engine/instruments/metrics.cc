// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <tuple>

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/engine/rendezvous/rendezvous.h>
#include <weft/profiling/trace/depth.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/progress.h>

namespace weft::instruments {

namespace {

using trace::Kind;

// 1 µs to 60 s.
const prometheus::Histogram::BucketBoundaries kSeconds{
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3,
    1e-2, 2e-2, 5e-2, 0.1,  0.2,  0.5,  1,    2,    5,    10,   60};

// The labels of groups: the names of the first ones, so that a program that goes on making groups
// of other names does not fill the registry.
class GroupLabels {
 public:
  // Of static lifetime; "" for an operation of no group.
  const char* of(const trace::MemberIdentity& party) {
    if (party.kind != "group") return "";
    {
      std::shared_lock lock(mutex_);
      if (const auto found = known_.find(party.name); found != known_.end()) return found->second;
      if (known_.size() >= kMost) return "(others)";
    }
    std::lock_guard lock(mutex_);
    if (known_.size() >= kMost) return "(others)";
    return known_.try_emplace(party.name, trace::keep(party.name)).first->second;
  }

 private:
  static constexpr std::size_t kMost = 64;
  std::shared_mutex mutex_;
  std::map<std::string, const char*> known_;
};

// Counts operations into a registry.
class Counting final : public trace::Observer {
 public:
  Counting(prometheus::Registry& registry, int rank)
      : labels_{{"rank", std::to_string(rank)}},
        operations_(prometheus::BuildCounter()
                        .Name("weft_operations_total")
                        .Help("Operations that have begun")
                        .Labels(labels_)
                        .Register(registry)),
        bytes_(prometheus::BuildCounter()
                   .Name("weft_bytes_total")
                   .Help("Bytes of this rank's tensors, inputs and outputs, in operations that "
                         "have begun; for calls, the arguments, and the result once it has arrived")
                   .Labels(labels_)
                   .Register(registry)),
        errors_(prometheus::BuildCounter()
                    .Name("weft_errors_total")
                    .Help("Operations that failed, by blame")
                    .Labels(labels_)
                    .Register(registry)) {
    auto& in_flight = prometheus::BuildGauge()
                          .Name("weft_in_flight")
                          .Help("Operations that have begun and not ended")
                          .Labels(labels_)
                          .Register(registry);
    auto& seconds = prometheus::BuildHistogram()
                        .Name("weft_operation_seconds")
                        .Help("From an operation's beginning to its end")
                        .Labels(labels_)
                        .Register(registry);
    for (std::size_t i = 0; i < trace::kKinds; ++i) {
      const char* kind = trace::name(static_cast<Kind>(i));
      in_flight_[i] = &in_flight.Add({{"kind", kind}});
      seconds_[i] = &seconds.Add({{"kind", kind}}, kSeconds);
    }
  }

  void begun(const trace::Member& member, Kind kind, const char* name,
             std::uint64_t bytes) noexcept override {
    in_flight_[place(kind)]->Increment();
    try {
      const Cells cells = cells_of(groups_.of(*member.party()), kind, name);
      cells.operations->Increment();
      cells.bytes->Increment(static_cast<double>(bytes));
    } catch (const std::exception&) {
      // not counted then
    }
  }

  void ended(Kind kind, const char* name, double seconds, const Error* error,
             std::uint64_t more) noexcept override {
    in_flight_[place(kind)]->Decrement();
    seconds_[place(kind)]->Observe(seconds);
    try {
      // Of calls, which belong to no group.
      if (more > 0) cells_of("", kind, name).bytes->Increment(static_cast<double>(more));
      if (error == nullptr) return;
      errors_.Add({{"kind", trace::name(kind)}, {"blame", std::string(weft::name(error->blame()))}})
          .Increment();
    } catch (const std::exception&) {
      // not counted then
    }
  }

 private:
  struct Cells {
    prometheus::Counter* operations = nullptr;
    prometheus::Counter* bytes = nullptr;
  };
  static std::size_t place(Kind kind) { return static_cast<std::size_t>(kind); }

  // Texts are few and have static lifetime, so they are compared by address.
  Cells cells_of(const char* group, Kind kind, const char* name) {
    const std::tuple key(group, kind, name);
    {
      std::shared_lock lock(mutex_);
      if (const auto found = cells_.find(key); found != cells_.end()) return found->second;
    }
    prometheus::Labels labels{{"kind", trace::name(kind)}, {"name", name}};
    if (*group != '\0') labels["group"] = group;
    std::lock_guard lock(mutex_);
    return cells_[key] = {&operations_.Add(labels), &bytes_.Add(labels)};
  }

  const prometheus::Labels labels_;
  prometheus::Family<prometheus::Counter>& operations_;
  prometheus::Family<prometheus::Counter>& bytes_;
  prometheus::Family<prometheus::Counter>& errors_;
  std::array<prometheus::Gauge*, trace::kKinds> in_flight_{};
  std::array<prometheus::Histogram*, trace::kKinds> seconds_{};
  GroupLabels groups_;
  std::shared_mutex mutex_;
  std::map<std::tuple<const char*, Kind, const char*>, Cells> cells_;
};

// Metrics that are counted elsewhere, read when Prometheus asks for them.
class Standing final : public prometheus::Collectable {
 public:
  explicit Standing(int rank) : rank_(rank) {}
  std::vector<prometheus::MetricFamily> Collect() const override {
    prometheus::ClientMetric metric;
    metric.label = {{"rank", std::to_string(rank_)}};
    metric.counter.value = static_cast<double>(trace::progress().steps.load());
    std::vector<prometheus::MetricFamily> families{{"weft_steps_total",
                                                    "Training steps that have begun",
                                                    prometheus::MetricType::Counter,
                                                    {metric}}};
    add_waits(families);
    const auto add = [&](trace::Queue queue, const char* name, const char* label,
                         const char* help) {
      std::vector<prometheus::ClientMetric> metrics;
      for (const trace::Depth* depth : trace::depths()) {
        if (depth->queue != queue) continue;
        metrics.push_back({});
        metrics.back().label = {{"rank", std::to_string(rank_)}, {label, depth->of}};
        metrics.back().gauge.value =
            static_cast<double>(depth->now.load(std::memory_order_relaxed));
      }
      if (!metrics.empty())
        families.push_back({name, help, prometheus::MetricType::Gauge, std::move(metrics)});
    };
    add(trace::Queue::Calls, "weft_calls_in_flight", "peer",
        "Calls made by this process and not answered yet, by the worker that is called");
    add(trace::Queue::Handlers, "weft_queued_handlers", "agent",
        "Incoming calls and continuations for which no thread is free yet");
    add(trace::Queue::Messages, "weft_queued_messages", "transport",
        "Messages that connections could not send yet");
    return families;
  }

 private:
  void add_waits(std::vector<prometheus::MetricFamily>& families) const {
    prometheus::MetricFamily seconds{
        "weft_waited_seconds_total",
        "Time in which this rank waited for others and did nothing for them, by the backend",
        prometheus::MetricType::Counter,
        {}};
    for (const trace::HostTime::Waited& one : trace::host_time().waited()) {
      seconds.metric.push_back({});
      seconds.metric.back().label = {
          {"rank", std::to_string(rank_)}, {"host", host_}, {"backend", one.backend}};
      seconds.metric.back().counter.value = static_cast<double>(one.nanoseconds) * 1e-9;
    }
    if (!seconds.metric.empty()) families.push_back(std::move(seconds));
    const double share = trace::host_time().share_of_steps();
    if (std::isnan(share)) return;
    prometheus::ClientMetric metric;
    metric.label = {{"rank", std::to_string(rank_)}, {"host", host_}};
    metric.gauge.value = share;
    families.push_back({"weft_waited_share",
                        "Share of the last steps, at most 32, in which this rank waited for "
                        "others, 0 to 1; the others wait for the rank that waits least",
                        prometheus::MetricType::Gauge,
                        {metric}});
  }

  const int rank_;
  const std::string host_ = trace::host_name();
};

// Never destroyed, because operations end while the process ends.
struct Service {
  Service(const std::string& address, int rank)
      : registry(std::make_shared<prometheus::Registry>()),
        standing(std::make_shared<Standing>(rank)),
        counting(*registry, rank),
        exposer(address, 2) {
    exposer.RegisterCollectable(registry);
    exposer.RegisterCollectable(standing);
    trace::observe(counting);
    trace::count_host_time();
  }
  std::shared_ptr<prometheus::Registry> registry;
  std::shared_ptr<Standing> standing;
  Counting counting;
  prometheus::Exposer exposer;
};

constinit ForkMutex serving(ForkOrder::Engine);
Service* service WEFT_GUARDED_BY(serving) = nullptr;
// The process that serves: a forked child has `service`, but none of its threads.
pid_t served_in WEFT_GUARDED_BY(serving) = 0;

}  // namespace

void serve_metrics(const std::string& text, int rank) {
  MutexLock lock(serving);
  if (served_in == ::getpid()) return;
  const std::string address =
      metrics_address(text, group::local_rank(group::process_environment()).value_or(0));
  try {
    service = new Service(address, rank);
    served_in = ::getpid();
  } catch (const std::exception& error) {
    if (service != nullptr) {
      // The parent process may use the port of this rank.
      log::warn(
          "this rank serves no metrics, only the process that it was forked from does: cannot "
          "listen on " +
          address + " (" + error.what() + ")");
      return;
    }
    throw Error(Blame::Caller, "WEFT_METRICS: cannot listen on " + address + " (" + error.what() +
                                   "); choose another port, and if several ranks share a machine, "
                                   "start them with weft-run or give each its LOCAL_RANK");
  }
  log::info("metrics are served at http://" + address + "/metrics");
}

}  // namespace weft::instruments
