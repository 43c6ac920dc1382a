// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/rref/users.h>

namespace weft::rref {

void Users::enter(const Handle& user) {
  MutexLock lock(mutex_);
  users_.emplace(user.fork(), &user);
}

void Users::forget(const Handle& user) {
  MutexLock lock(mutex_);
  const auto found = users_.find(user.fork());
  if (found != users_.end() && found->second == &user) users_.erase(found);
}

bool Users::has(ForkId fork) const {
  MutexLock lock(mutex_);
  return users_.contains(fork);
}

std::vector<std::string> Users::held() const {
  std::vector<std::string> all;
  MutexLock lock(mutex_);
  for (const auto& [fork, user] : users_) {
    const Origin& origin = user->origin();
    std::string text = describe(*user);
    if (origin.from >= 0) {
      text += ", sent by rank " + std::to_string(origin.from);
    } else {
      text += origin.function.empty() ? ", a copy"
                                      : ", made by remote<" + std::string(origin.function) + ">";
      if (origin.place.line > 0)
        text += " at " + std::string(origin.place.file) + ":" + std::to_string(origin.place.line);
    }
    all.push_back(std::move(text));
  }
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace weft::rref
