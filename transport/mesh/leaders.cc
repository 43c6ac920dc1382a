// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/mesh/levels.h>

namespace weft::transport::mesh {

namespace {

using Index = Plan::Index;

class Leaders : Levels {
 public:
  using Levels::Levels;
  // `kind`, of the leaders, is a barrier too.
  void all_reduce(Kind kind);
  void broadcast();
  void reduce();

 private:
  // Root leads its own host.
  int leader(int host) const {
    return host == root_host() ? job_.call.root : layout_.ranks_on(host).front();
  }
  std::vector<int> leaders() const {
    std::vector<int> all;
    for (int host = 0; host < layout_.hosts(); ++host) all.push_back(leader(host));
    return all;
  }
};

// Reduces to the leaders, then over the leaders, and hands the result out. A barrier is the same
// without data.
void Leaders::all_reduce(Kind kind) {
  Index ready = Plan::kNone;
  const bool leads = place_ == 0;
  const Slice partial = widens_ && leads ? partial_of(job_.data) : Slice();
  if (!is_alone()) {
    Job gather = on_host(Kind::Reduce);
    gather.data = job_.data;
    gather.call.root = 0;
    gather.result = address(partial);
    gather.precision = first();
    ready = add(mates_, gather, {Algorithm::Direct, kWhole}, ready, Plan::kNone);
  } else if (widens_) {
    ready = widen(job_.data, partial);
  }
  if (leads) {
    Job exchange = between_hosts(kind);
    exchange.data = job_.data;
    exchange.from = address(partial);
    exchange.precision = last();
    exchange.averaged = job_.ranks;
    const bool doubles = layout_.hosts() >= kManyHosts && !widens_;
    ready = add(layout_.owners(0), exchange, {doubles ? Algorithm::Doubling : Algorithm::Direct},
                ready, Plan::kNone);
  }
  if (is_alone()) return;
  Job result = on_host(Kind::Broadcast);
  result.data = job_.data;
  result.call.root = 0;
  add(mates_, result, {Algorithm::Direct}, ready, Plan::kNone);
}

void Leaders::broadcast() {
  Index ready = Plan::kNone;
  const int own = leader(host_);
  if (job_.rank == own) {
    const auto all = leaders();
    Job exchange = between_hosts(Kind::Broadcast);
    exchange.data = job_.data;
    exchange.call.root = root_host();
    const bool many = layout_.hosts() >= kManyHosts;
    ready = add(all, exchange, {many ? Algorithm::Tree : Algorithm::Direct}, ready, Plan::kNone);
  }
  if (is_alone()) return;
  Job result = on_host(Kind::Broadcast);
  result.data = job_.data;
  result.call.root = layout_.place_of(own);
  add(mates_, result, {Algorithm::Direct}, ready, Plan::kNone);
}

void Leaders::reduce() {
  const int own = leader(host_);
  const bool is_root = job_.rank == job_.call.root, leads = job_.rank == own;
  Index ready = Plan::kNone;
  Slice sum = job_.data;
  // Only root's bytes may change.
  if (leads && (widens_ || (!is_root && !is_alone()))) sum = partial_of(job_.data);
  if (!is_alone()) {
    Job gather = on_host(Kind::Reduce);
    gather.data = job_.data;
    gather.call.root = layout_.place_of(own);
    gather.result = leads ? address(sum) : nullptr;
    gather.precision = first();
    ready = add(mates_, gather, {Algorithm::Direct, kWhole}, ready, Plan::kNone);
  } else if (widens_) {
    ready = widen(job_.data, sum);
  }
  if (!leads) return;
  const auto all = leaders();
  Job exchange = between_hosts(Kind::Reduce);
  exchange.data = sum;
  exchange.result = address(job_.data);  // of root only
  exchange.precision = last();
  exchange.call.root = root_host();
  exchange.averaged = job_.ranks;
  add(all, exchange, {Algorithm::Direct, kWhole}, ready, Plan::kNone);
}

}  // namespace

void append_by_leaders(Plan& plan, const Job& job, Scratch& scratch) {
  Leaders leaders(plan, job, scratch);
  if (job.call.kind == Kind::Broadcast) return leaders.broadcast();
  if (job.call.kind == Kind::Reduce) return leaders.reduce();
  leaders.all_reduce(job.call.kind);
}

}  // namespace weft::transport::mesh
