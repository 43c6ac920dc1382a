// How the ranks of a group find each other before they are connected: a small key-value store that
// all of them see. The engine gives one over c10d's stores; tests give one in memory. Keys are
// already prefixed for the group. Thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <weft/base/deadline.h>

namespace weft::transport {

class Bootstrap {
 public:
  using Bytes = std::vector<std::byte>;
  virtual ~Bootstrap() = default;

  virtual void set(const std::string& key, const Bytes& value) = 0;
  // Blocks until the key exists; throws Timeout, naming the key, when the deadline comes first.
  virtual Bytes get(const std::string& key, Deadline deadline) = 0;
  // Adds to a counter that starts at 0; returns the new value.
  virtual long add(const std::string& key, long amount) = 0;
  virtual bool exists(const std::string& key) = 0;
  // Sets the key to `desired` if its value is `expected`, in one step; an empty `expected` stands
  // for a key that does not exist as well. Returns whether it did. The two differ.
  virtual bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) = 0;
  virtual void erase(const std::string& key) = 0;
};

}  // namespace weft::transport
