package kv

import (
	"jbofd/client"
	"jbofd/client/internal/host"
	"jbofd/client/internal/kvop"
	"jbofd/internal/nvme"
)

// Errors to decide by, besides those of package client. They come wrapped with what happened: as a
// *client.StatusError where the target says so, or from the host itself.
var (
	// ErrKeyNotFound: there is no such key.
	ErrKeyNotFound = host.ErrKeyNotFound
	// ErrKeyExists: PutIfAbsent found the key.
	ErrKeyExists = host.ErrKeyExists
	// ErrCapacityExceeded: the namespace has no space for the value; deleting makes some.
	ErrCapacityExceeded = host.ErrCapacityExceeded
	// ErrValueTooLarge: the namespace, or one command, takes no value of this size.
	ErrValueTooLarge = host.ErrValueTooLarge
	// ErrKeyCollision: another key with the same hash is there; see Options.LongKeys.
	ErrKeyCollision = host.ErrKeyCollision
	// ErrForeignValue: the value under the hash of a long key was not stored with long keys.
	ErrForeignValue = host.ErrForeignValue
)

// Opcodes and options of the Key Value command set, for a client.QPair's user.
const (
	OpStore    = nvme.CmdKVStore
	OpRetrieve = nvme.CmdKVRetrieve
	OpList     = nvme.CmdKVList
	OpDelete   = nvme.CmdKVDelete
	OpExist    = nvme.CmdKVExist

	StoreMustExist    = nvme.KVStoreMustExist
	StoreMustNotExist = nvme.KVStoreMustNotExist
)

// SetStore makes c a Store of value under key in namespace nsid, for a client.QPair; options are
// StoreMustExist, StoreMustNotExist, or 0. key has 1 to 16 bytes and is the caller's again. c.Tag is left alone.
//
// Cost: 0 allocs, as the other setters.
func SetStore(c *client.Command, nsid uint32, key, value []byte, options uint8) { // hot: 0 allocs
	kvop.SetStore(c, nsid, key, value, options)
}

// SetRetrieve makes c a Retrieve: dst gets as much of the value as fits, and the low half of
// Completion.Result is the size of all of it.
func SetRetrieve(c *client.Command, nsid uint32, key, dst []byte) { // hot: 0 allocs
	kvop.SetRetrieve(c, nsid, key, dst)
}

// SetDelete makes c a Delete.
func SetDelete(c *client.Command, nsid uint32, key []byte) { kvop.SetDelete(c, nsid, key) } // hot: 0 allocs

// SetExist makes c an Exist, which succeeds if the key exists.
func SetExist(c *client.Command, nsid uint32, key []byte) { kvop.SetExist(c, nsid, key) } // hot: 0 allocs

// SetList makes c a List: dst gets keys from key on, or from the first one on if key is empty.
func SetList(c *client.Command, nsid uint32, key, dst []byte) { kvop.SetList(c, nsid, key, dst) } // hot: 0 allocs
