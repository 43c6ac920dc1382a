// SPDX-License-Identifier: Apache-2.0
#include "workers.h"

#include <cstdio>
#include <stdexcept>

namespace examples {

Workers::Workers(const std::string& name, const std::string& description, Numbers numbers)
    : options(name, description, numbers.usual > 0 ? numbers.usual : numbers.least),
      name_(name),
      numbers_(numbers) {
  options.add("--transport", transports_,
              "Transport of calls: shm, tcp, … (default: the best that the workers have in common)",
              transport());
}

int Workers::run(int argc, char** argv, const std::function<std::string(int rank)>& name_of,
                 const std::function<void(weft::rpc::Agent&)>& body) {
  options.parse(argc, argv);
  try {
    torch::set_num_threads(1);
    const int rank = weft::launched_rank_or(0);
    const int ranks = weft::launched_world_size_or(1);
    if (ranks < numbers_.least || (numbers_.most > 0 && ranks > numbers_.most)) {
      throw std::runtime_error("it takes " + std::to_string(numbers_.least) + " workers" +
                               (numbers_.most == numbers_.least ? "" : " or more") + ", not " +
                               std::to_string(ranks) + ": " + options.command());
    }
    // Sets the seed before another worker can have this one make a module.
    torch::manual_seed(static_cast<std::uint64_t>(rank));
    auto agent = weft::rpc::init(name_of(rank), {.transports = transports_});
    body(agent);
    agent.shutdown();
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", name_.c_str(), error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name_.c_str(), error.what());
  }
  return 1;
}

}  // namespace examples
