// Which of the groups of one name and the same members that a process was in is which of another's.
// Each process counts them by itself (trace::Member): who came in place of a rank that was lost has
// counted less than the others.
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
  // All of a process before others are asked for. `jobs`: that it has joined, the newest last.
  void add_process(std::size_t process, const std::vector<std::string>& jobs) {
    jobs_[process] = jobs;
  }
  void add(std::size_t process, const std::string& name, const std::vector<int>& ranks,
           std::uint32_t generation);

  // The same number in all processes. Where two have the newest job in common, and one of them was
  // not in all that the other was in, their newest are the same group: each job makes it once.
  // (Else the numbers are, as far as is known.)
  std::uint32_t common(std::size_t process, const std::string& name, const std::vector<int>& ranks,
                       std::uint32_t generation) const;

 private:
  bool came_later(std::size_t process, std::size_t other) const;

  std::map<std::size_t, std::vector<std::string>> jobs_;  // by process
  std::map<std::pair<std::string, std::vector<int>>, std::map<std::size_t, std::uint32_t>> newest_;
};

}  // namespace weft::tools
