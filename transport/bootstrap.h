// SPDX-License-Identifier: Apache-2.0
// A small key-value store that all ranks of a group see, through which they find each other before
// they are connected. The engine implements it over c10d's stores, tests in memory. Keys are
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
  // Blocks until the key exists. Throws Timeout, naming the key, if the deadline passes first.
  virtual Bytes get(const std::string& key, Deadline deadline) = 0;
  // Adds to a counter that starts at 0. Returns the new value.
  virtual long add(const std::string& key, long amount) = 0;
  virtual bool exists(const std::string& key) = 0;
  // Atomically sets the key to `desired` if its value is `expected`; an empty `expected` also
  // matches a key that does not exist. Returns whether it did. `expected` and `desired` must
  // differ.
  virtual bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) = 0;
  virtual void erase(const std::string& key) = 0;
};

}  // namespace weft::transport
