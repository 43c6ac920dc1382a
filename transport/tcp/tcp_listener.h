// Takes connections in on one or several addresses. Only who greets this very listener comes
// through; the rest is put out, after a while also where it says nothing. A lane of several sockets
// comes through when all of them are here; how many it has is for who connects to say. All on the
// loop.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <weft/transport/byte_stream.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/transport.h>

namespace weft::transport::tcp {

class TcpListener final : public Listener {
 public:
  using Accepted = std::function<void(std::unique_ptr<ByteStream>)>;
  using Short = std::function<void(const Error&)>;  // ListenOptions::short_of_something
  // `interface_address` as local_addresses() takes it; a host's name is resolved here, which may
  // block. Throws Caller, Busy.
  TcpListener(const std::shared_ptr<EventLoop>& loop, const std::string& interface_address,
              const Settings& settings, Accepted accepted, Short short_of_something = {});
  // Nobody gets in any more; `accepted` may run on the loop at this moment for the last time.
  ~TcpListener() override;
  std::string address() const override { return address_; }

 private:
  class Entrance;
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Entrance> entrance_;  // the loop's handlers own it as well
  std::string address_;
};

}  // namespace weft::transport::tcp
