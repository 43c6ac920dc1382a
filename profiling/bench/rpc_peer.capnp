# The calls of rpc_bench, for its Cap'n Proto peer.
@0xd1a5c0b7e6f24391;

interface Peer {
  add @0 (a :Int64, b :Int64) -> (value :Int64);
  giveBack @1 (data :Data) -> (data :Data);
  end @2 ();
}
