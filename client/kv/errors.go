package kv

import (
	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/internal/kvop"
	"jbofd/internal/nvme"
)

// Errors for errors.Is, besides those of package client. They come wrapped: in a *client.StatusError if the target has
// reported them, or in an error of the host.
var (
	// ErrKeyNotFound: the key does not exist.
	ErrKeyNotFound = host.ErrKeyNotFound
	// ErrKeyExists: PutIfAbsent has found the key.
	ErrKeyExists = host.ErrKeyExists
	// ErrCapacityExceeded: the namespace has no space for the value. Deleting keys frees space.
	ErrCapacityExceeded = host.ErrCapacityExceeded
	// ErrVersionMismatch: the key has another version than PutIfVersion or DeleteIfVersion expects: see VersionError.
	ErrVersionMismatch = host.ErrVersionMismatch
	// ErrSuperseded: the key has the same version as the one to store, or a newer one: see VersionError.
	ErrSuperseded = host.ErrSuperseded
	// ErrValueTooLarge: the value is larger than the namespace or one command allows.
	ErrValueTooLarge = host.ErrValueTooLarge
	// ErrKeyCollision: another key with the same hash exists; see Options.LongKeys.
	ErrKeyCollision = host.ErrKeyCollision
	// ErrForeignValue: the value was not stored with Options.LongKeys.
	ErrForeignValue = host.ErrForeignValue
)

// Opcodes and options of the Key Value command set, for commands of a client.QPair.
const (
	OpStore    = nvme.CmdKVStore
	OpRetrieve = nvme.CmdKVRetrieve
	OpList     = nvme.CmdKVList
	OpDelete   = nvme.CmdKVDelete
	OpExist    = nvme.CmdKVExist

	StoreMustExist    = nvme.KVStoreMustExist
	StoreMustNotExist = nvme.KVStoreMustNotExist
)

// SetStore makes c a Store of value under key in namespace nsid. options is StoreMustExist, StoreMustNotExist or 0. key
// has 1 to 16 bytes and is copied. c.Tag is not changed.
//
// Cost: 0 allocs, as of the other setters.
func SetStore(c *client.Command, nsid uint32, key, value []byte, options uint8) { // hot: 0 allocs
	kvop.SetStore(c, nsid, key, value, options)
}

// SetRetrieve makes c a Retrieve: dst receives as much of the value as fits, and the low half of Completion.Result is
// the size of the whole value.
func SetRetrieve(c *client.Command, nsid uint32, key, dst []byte) { // hot: 0 allocs
	kvop.SetRetrieve(c, nsid, key, dst)
}

// SetDelete makes c a Delete.
func SetDelete(c *client.Command, nsid uint32, key []byte) { kvop.SetDelete(c, nsid, key) } // hot: 0 allocs

// SetExist makes c an Exist, which has status Success if the key exists.
func SetExist(c *client.Command, nsid uint32, key []byte) { kvop.SetExist(c, nsid, key) } // hot: 0 allocs

// SetList makes c a List: dst receives keys, beginning with key, or with the first one if key is empty.
func SetList(c *client.Command, nsid uint32, key, dst []byte) { kvop.SetList(c, nsid, key, dst) } // hot: 0 allocs
