// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/rendezvous/scheme.h>
#include <weft/engine/store/store.h>

namespace weft::group {

namespace {

std::string name_of(const Wanted& wanted) {
  if (!wanted.rank) return "a process without a rank";
  return "rank " + std::to_string(*wanted.rank) +
         (wanted.world_size ? " of " + std::to_string(*wanted.world_size) : "");
}

}  // namespace

Seeker::Seeker(const Wanted& wanted, const Environment& environment, WaitReports reports)
    : patience_(std::move(reports)), begin_(name_of(wanted)) {
  const auto local = local_rank(environment);
  speaks_ = wanted.rank.value_or(0) <= 1 || local.value_or(0) == 0;
  if (!wanted.said_by.empty()) said_by_ = "; its rank and world size are from " + wanted.said_by;
}

void Seeker::look(const std::function<std::string()>& why) {
  if (!patience_.is_over() || !speaks_) return;
  log::warn(begin_ + " has waited " + describe_wait(patience_.waited()) + " for " + why() +
            said_by_);
}

void check_range(int rank, int world_size) {
  if (world_size < 1)
    throw Error(Blame::Caller,
                "the world size is " + std::to_string(world_size) + "; it is at least 1");
  if (rank < 0 || rank >= world_size) {
    throw Error(Blame::Caller, "rank " + std::to_string(rank) + " is outside a world of " +
                                   std::to_string(world_size) + "; ranks go from 0 to " +
                                   std::to_string(world_size - 1));
  }
}

int require_world_size(const Wanted& wanted, const std::string& method, const char* or_else) {
  if (wanted.world_size) return *wanted.world_size;
  throw Error(Blame::Caller,
              "no world size for " + method + ": set world_size in the options" + or_else);
}

int require_rank(const Wanted& wanted, const std::string& method, const char* or_else) {
  if (wanted.rank) return *wanted.rank;
  throw Error(Blame::Caller, "no rank for " + method + ": set rank in the options" + or_else);
}

std::chrono::milliseconds limit_for_c10d(Deadline deadline) {
  return std::min(deadline.remaining(), kLongestTimeout);
}

c10::intrusive_ptr<c10d::Store> under_name(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::string& name) {
  return c10::make_intrusive<c10d::PrefixStore>(name.empty() ? "default_pg" : name, store);
}

std::string at(const std::string& host, int port) {
  const bool six = host.find(':') != std::string::npos;
  return "tcp://" + (six ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

}  // namespace weft::group
