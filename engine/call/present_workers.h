// SPDX-License-Identifier: Apache-2.0
// The other workers of a job in which workers come and go, as far as this one has heard, and the
// news of them for the program. Usable from every thread. Nothing here blocks but the program's
// callbacks.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/types.h>

namespace weft::call {

class PresentWorkers {
 public:
  // False if this worker, or a later one of its rank, is known already.
  bool add(const Member& worker);
  // False if it is not known.
  bool remove(int rank, Generation generation);
  std::optional<Member> find(int rank) const;
  bool has(const std::string& name) const;
  // Workers that cannot be in the job beside this one: earlier ones of its rank, and others of its
  // name.
  std::vector<Member> replaced_by(const Member& worker) const;
  // Each worker watches those of the next lower and the next higher rank. Returns those of them
  // that have become neighbours since the last call.
  std::vector<int> new_neighbours(int self);

 private:
  mutable Mutex mutex_;
  std::map<int, Member> workers_ WEFT_GUARDED_BY(mutex_);
  std::map<int, Generation> watched_ WEFT_GUARDED_BY(mutex_);
};

using LostCallback = std::function<void(const WorkerInfo&, const Error&)>;
using JoinedCallback = std::function<void(const WorkerInfo&)>;

// The program's callbacks, and the news that they have not been called with yet, in order.
class News {
 public:
  void on_lost(LostCallback callback);
  void on_joined(JoinedCallback callback);
  bool tells_of_losses() const;
  // True if no thread delivers the news at present: then the caller has some thread call tell().
  bool add_lost(const WorkerInfo& worker, const Error& why);
  bool add_joined(const WorkerInfo& worker);
  // Calls the callbacks, one after the other, until there is no news. Logs the exceptions that they
  // throw.
  void tell(const std::string& self);
  // Drops all news and callbacks.
  void close();

 private:
  struct One {
    WorkerInfo worker;
    std::optional<Error> lost;  // empty: it has joined
  };
  bool add(One one);
  std::optional<One> next();

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<const LostCallback>> lost_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const JoinedCallback>> joined_ WEFT_GUARDED_BY(mutex_);
  std::deque<One> untold_ WEFT_GUARDED_BY(mutex_);
  bool tells_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::call
