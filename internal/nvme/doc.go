// Package nvme holds NVMe's wire formats as views over bytes: queue entries, Identify
// data, log pages, features, properties and fabrics commands, after NVMe Base 2.0, NVM
// Command Set 1.0 and Key Value Command Set 1.0 as Linux hosts, nvme-cli and SPDK use them. It does no I/O, keeps no state and
// knows nobody.
//
// Each structure is a byte array of its exact size (or a byte slice where the wire
// decides the length) with a getter and a setter per field, all little endian:
//
//	 SQE  64   SQE.Connect(), .Property(), .Identify(), .GetLog(), .Features(), .Abort(), .KV():
//	           what the CDWs mean for a command
//	 CQE  16   completion; Status is a value, not an error
//	4096       Identify data: IdentifyController, IdentifyNamespace, IdentifyNamespaceKV, NSList, ...
//	 ...       log pages: SMARTLog, EffectsLog, ANALog, DiscoveryLog, ...
//	1024       ConnectData
//	 ...       KVList
//
// Fields of bytes that came from elsewhere can be read without fear: no getter panics, whatever
// the bytes. What must hold before they are believed is in a type's Check method, whose error
// names the field, its value and what is allowed. Reserved fields are written as zero and not
// looked at when read, as the specification asks.
//
// A getter's meaning is its field's in the specification; comments stand where a unit, a
// base (0-based counts) or a bit layout would otherwise have to be looked up.
package nvme
