// SPDX-License-Identifier: Apache-2.0
// Matches the groups of one name with the same members between processes. Each process counts them
// by itself (trace::Member), so a process that replaced a lost rank has counted fewer than the
// others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft::tools {

class Generations {
 public:
  // Adds a process, and its groups with add(); add all before the first common(). `jobs` are the
  // jobs that it has joined, the newest last.
  void add_process(std::size_t process, const std::vector<std::string>& jobs) {
    jobs_[process] = jobs;
  }
  void add(std::size_t process, const std::string& name, const std::vector<int>& ranks,
           std::uint32_t generation);

  // Returns a generation that is equal in all processes. If two processes share the newest job, and
  // one of them has not joined all jobs of the other, their newest groups are the same group,
  // because each job makes it once. (Otherwise the numbers are taken to be equal already.)
  std::uint32_t common(std::size_t process, const std::string& name, const std::vector<int>& ranks,
                       std::uint32_t generation) const;

 private:
  bool came_later(std::size_t process, std::size_t other) const;

  std::map<std::size_t, std::vector<std::string>> jobs_;  // by process
  std::map<std::pair<std::string, std::vector<int>>, std::map<std::size_t, std::uint32_t>> newest_;
};

}  // namespace weft::tools
