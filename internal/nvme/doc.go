// Package nvme defines NVMe's wire formats as views over bytes: queue entries, Identify data, log pages, features,
// properties and fabrics commands. It follows NVMe Base 2.0, NVM Command Set 1.0 and Key Value Command Set 1.0 as Linux
// hosts, nvme-cli and SPDK use them. It does no I/O, keeps no state, and depends on no other package of jbofd but uuid.
//
// Each structure is a byte array of its exact size, or a byte slice if its length varies. It has a getter and a setter
// for each field; all fields are little endian:
//
//	 SQE  64   SQE.Connect(), .Property(), .Identify(), .GetLog(), .Features(), .Abort(), .KV():
//	           what the CDWs mean for a command
//	 CQE  16   completion; Status is a value, not an error
//	4096       Identify data: IdentifyController, IdentifyNamespace, IdentifyNamespaceKV, NSList, ...
//	 ...       log pages: SMARTLog, EffectsLog, ANALog, DiscoveryLog, ...
//	1024       ConnectData
//	 ...       KVList
//
// Getters are safe on received bytes: no getter panics, whatever the bytes are. The Check method of a type validates
// the bytes. Its error names the field, its value and the allowed values. Reserved fields are written as zero and
// ignored when read, as the specification requires.
//
// A getter returns the field of that name in the specification. It has a comment only where the unit, the base (0-based
// counts) or the bit layout would otherwise have to be looked up.
package nvme
